"""`penstock measure`: have every tier answer prompts and the judge score them, for the planner's quality file."""

import asyncio
import csv
import json as json_module
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.cli import options, targets
from penstock.cli.held_out import Question, QuestionsError, read_questions
from penstock.cli.output import cli_error_handling, console, errors, fail, print_json, print_written
from penstock.client.aio import AsyncClient
from penstock.client.judging import Answered, AsyncJudge
from penstock.client.types import Options


@dataclass(frozen=True, slots=True)
class _Scored:
    question: Question
    answered: Answered
    score: float

    @property
    def good(self) -> bool:
        return self.question.answered_by(self.answered.reply.text)


def measure(
    prompts: Annotated[
        Path, typer.Argument(help="JSONL file with prompt, or the messages of a chat, and, if known, answer.")
    ],
    out: Annotated[Path, options.new_file("--out", help="The quality file to write, for `penstock plan`.")] = Path(
        "judged.csv"
    ),
    labelled: Annotated[
        Path | None,
        options.new_file(
            "--labelled", help="Also write samples for the calibration of scorers; every prompt needs an answer."
        ),
    ] = None,
    scorer: Annotated[str, typer.Option("--scorer", help="Scorer to use; default: the judge's default scorer.")] = "",
    max_tokens: Annotated[
        int | None,
        options.number("--max-tokens", help="Largest length of a reply, in tokens.", least=1, most=options.MAX_TOKENS),
    ] = None,
    concurrency: Annotated[
        int, options.number("--concurrency", help="Prompts in flight.", least=1, most=options.MAX_CONCURRENCY)
    ] = 16,
    target: targets.Target = None,
    admin: targets.Admin = None,
    json: targets.Json = False,
) -> None:
    """Measure the quality of each tier on your prompts: every tier answers all of them, and the judge scores every answer."""
    try:
        questions = read_questions(prompts)
    except QuestionsError as error:
        fail(str(error), 2)
    if labelled is not None and any(question.answer is None for question in questions):
        fail(f"{prompts}: --labelled needs an answer with every prompt", 2)
    if labelled is not None and any(not isinstance(question.prompt, str) for question in questions):
        fail(f"{prompts}: --labelled needs prompts of one message: samples for calibration hold no chats", 2)
    routers, listeners = targets.resolve(target), targets.resolve_admin(admin)
    generation = Options(temperature=0, max_tokens=max_tokens, top_logprobs=0)
    with cli_error_handling(routers):
        scores = asyncio.run(_measure(routers, listeners, questions, generation, scorer, concurrency, quiet=json))
    _write_quality(out, scores)
    if labelled is not None:
        _write_labelled(labelled, scores)
    figures = [_figures(tier, scored) for tier, scored in scores.items()]
    if json:
        print_json({"prompts": len(questions), "out": str(out), "tiers": figures})
        return
    table = Table(title=f"{len(questions)} prompts")
    for column in ("tier", "mean score", "output tokens", "right"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for row in figures:
        right = "-" if row["right"] is None else f"{row['right']:.0%}"
        table.add_row(row["tier"], f"{row['mean_score']:.1f}", f"{row['mean_output_tokens']:.0f}", right)
    console.print(table)
    print_written(out, labelled)


async def _measure(
    routers: str,
    admin: str,
    questions: list[Question],
    generation: Options,
    scorer: str,
    concurrency: int,
    *,
    quiet: bool,
) -> dict[str, list[_Scored]]:
    """The scored answers by tier, in the order of the prompts. Tiers are in the plan's order."""
    slots = asyncio.Semaphore(concurrency)
    async with AsyncClient(routers, admin=admin, api_key=targets.api_key(), tls=targets.tls()) as client:
        status = await client.status()
        judge_address = next(
            (i.admin_address for i in status.instances if i.role == "judge" and i.state == "ready"), None
        )
        if judge_address is None:
            fail("the mesh has no judge that is ready")
        columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=errors, transient=True, disable=quiet) as progress:
            bar = progress.add_task("", total=len(questions) * len(status.tiers))
            async with AsyncJudge(judge_address, tls=targets.tls()) as judge:

                async def one(tier: str, question: Question) -> _Scored:
                    async with slots:
                        reply = await client.generate(question.prompt, generation, model=tier)
                        answered = Answered(question.prompt, reply, question.answer)
                        (score,) = await judge.score([answered], scorer)
                    progress.advance(bar)
                    return _Scored(question, answered, score)

                return {
                    tier.name: await asyncio.gather(*(one(tier.name, question) for question in questions))
                    for tier in status.tiers
                }


def _write_quality(path: Path, scores: dict[str, list[_Scored]]) -> None:
    columns = ["prompt_id", "input_tokens"]
    columns += [f"{tier}_{what}" for tier in scores for what in ("output_tokens", "judge_score")]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for i, row in enumerate(zip(*scores.values(), strict=True)):
            cells: list[object] = [f"p{i}", row[0].answered.reply.usage.prompt_tokens]
            for scored in row:
                cells += [scored.answered.reply.usage.output_tokens, f"{scored.score:.6g}"]
            writer.writerow(cells)


def _write_labelled(path: Path, scores: dict[str, list[_Scored]]) -> None:
    with path.open("w") as file:
        for tier, answers in scores.items():
            for answer in answers:
                values = [position.chosen.logprob for position in answer.answered.reply.logprobs]
                row: dict[str, Any] = {
                    "prompt": answer.question.text,
                    "answer": answer.answered.reply.text,
                    "good": answer.good,
                    "reference": answer.answered.reference,
                    "tier": tier,
                    "finish_reason": answer.answered.reply.finish_reason.value,
                }
                if values:
                    row["mean_logprob"] = sum(values) / len(values)
                    row["min_logprob"] = min(values)
                file.write(json_module.dumps(row) + "\n")


def _figures(tier: str, scored: list[_Scored]) -> dict[str, Any]:
    correct = [answer.good for answer in scored if answer.answered.reference is not None]
    return {
        "tier": tier,
        "mean_score": statistics.fmean(answer.score for answer in scored),
        "mean_output_tokens": statistics.fmean(answer.answered.reply.usage.output_tokens for answer in scored),
        "right": statistics.fmean(correct) if correct else None,
    }
