"""`penstock measure`: ask every tier of the running mesh, have its judge score the answers: the planner's quality file."""

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
from penstock.cli.demo import final_answer
from penstock.cli.output import cli_error_handling, console, errors, fail, print_json, print_written
from penstock.client.aio import AsyncClient
from penstock.client.judging import Answered, AsyncJudge
from penstock.client.types import Options


@dataclass(frozen=True, slots=True)
class _Asked:
    prompt: str
    reference: str | None


@dataclass(frozen=True, slots=True)
class _Scored:
    answered: Answered
    score: float

    @property
    def good(self) -> bool:
        return final_answer(self.answered.reply.text) == final_answer(self.answered.reference or "")


def measure(
    prompts: Annotated[Path, typer.Argument(help="JSONL: prompt, and answer where the expected one is known.")],
    out: Annotated[Path, options.new_file("--out", help="The quality file for `penstock plan`.")] = Path("judged.csv"),
    labelled: Annotated[
        Path | None,
        options.new_file(
            "--labelled", help="Also write samples to calibrate scorers with; every prompt needs its answer."
        ),
    ] = None,
    scorer: Annotated[str, typer.Option("--scorer", help="Of the judge's scorers; else its default.")] = "",
    max_tokens: Annotated[
        int | None, options.number("--max-tokens", help="Of a reply.", least=1, most=options.MAX_TOKENS)
    ] = None,
    concurrency: Annotated[
        int, options.number("--concurrency", help="Prompts under way at once.", least=1, most=options.MAX_CONCURRENCY)
    ] = 16,
    target: targets.Target = None,
    json: targets.Json = False,
) -> None:
    """Measure what each tier makes of your prompts: every tier answers all of them, the judge scores every answer."""
    asked = _read(prompts)
    if labelled is not None and any(one.reference is None for one in asked):
        fail(f"{prompts}: --labelled needs an answer with every prompt", 2)
    where = targets.resolve(target)
    wanted = Options(temperature=0, max_tokens=max_tokens, top_logprobs=0)
    with cli_error_handling(where):
        found = asyncio.run(_measure(where, asked, wanted, scorer, concurrency, quiet=json))
    _write_quality(out, found)
    if labelled is not None:
        _write_labelled(labelled, found)
    figures = [_figures(tier, scored) for tier, scored in found.items()]
    if json:
        print_json({"prompts": len(asked), "out": str(out), "tiers": figures})
        return
    table = Table(title=f"{len(asked)} prompts")
    for column in ("tier", "mean score", "output tokens", "right"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for one in figures:
        right = "-" if one["right"] is None else f"{one['right']:.0%}"
        table.add_row(one["tier"], f"{one['mean_score']:.1f}", f"{one['mean_output_tokens']:.0f}", right)
    console.print(table)
    print_written(out, labelled)


def _read(path: Path) -> list[_Asked]:
    asked = []
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        fail(f"{path}: {error.strerror}", 2)
    for number, line in enumerate(lines, start=1):
        try:
            row = json_module.loads(line)
            asked.append(_Asked(str(row["prompt"]), str(row["answer"]) if "answer" in row else None))
        except KeyError:
            fail(f"{path}:{number}: prompt is missing", 2)
        except (ValueError, TypeError) as error:
            fail(f"{path}:{number}: {error}", 2)
    if not asked:
        fail(f"{path}: no prompts", 2)
    return asked


async def _measure(
    where: str, asked: list[_Asked], wanted: Options, scorer: str, concurrency: int, *, quiet: bool
) -> dict[str, list[_Scored]]:
    """Per tier, in the plan's order, the scored answers in the prompts' order."""
    places = asyncio.Semaphore(concurrency)
    async with AsyncClient(where) as client:
        status = await client.status()
        judge_at = next((i.address for i in status.instances if i.role == "judge" and i.state == "ready"), None)
        if judge_at is None:
            fail("this mesh has no judge")
        columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=errors, transient=True, disable=quiet) as progress:
            bar = progress.add_task("", total=len(asked) * len(status.tiers))
            async with AsyncJudge(judge_at) as judge:

                async def one(tier: str, question: _Asked) -> _Scored:
                    async with places:
                        reply = await client.generate(question.prompt, wanted, model=tier)
                        answered = Answered(question.prompt, reply, question.reference)
                        (score,) = await judge.score([answered], scorer)
                    progress.advance(bar)
                    return _Scored(answered, score)

                return {
                    tier.name: await asyncio.gather(*(one(tier.name, question) for question in asked))
                    for tier in status.tiers
                }


def _write_quality(path: Path, found: dict[str, list[_Scored]]) -> None:
    columns = ["prompt_id", "input_tokens"]
    columns += [f"{tier}_{what}" for tier in found for what in ("output_tokens", "judge_score")]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for i, row in enumerate(zip(*found.values(), strict=True)):
            cells: list[object] = [f"p{i}", row[0].answered.reply.usage.prompt_tokens]
            for one in row:
                cells += [one.answered.reply.usage.output_tokens, f"{one.score:.6g}"]
            writer.writerow(cells)


def _write_labelled(path: Path, found: dict[str, list[_Scored]]) -> None:
    with path.open("w") as file:
        for tier, scored in found.items():
            for one in scored:
                values = [position.chosen.logprob for position in one.answered.reply.logprobs]
                row: dict[str, Any] = {
                    "prompt": one.answered.prompt,
                    "answer": one.answered.reply.text,
                    "good": one.good,
                    "reference": one.answered.reference,
                    "tier": tier,
                }
                if values:
                    row["mean_logprob"] = sum(values) / len(values)
                file.write(json_module.dumps(row) + "\n")


def _figures(tier: str, scored: list[_Scored]) -> dict[str, Any]:
    known = [one.good for one in scored if one.answered.reference is not None]
    return {
        "tier": tier,
        "mean_score": statistics.fmean(one.score for one in scored),
        "mean_output_tokens": statistics.fmean(one.answered.reply.usage.output_tokens for one in scored),
        "right": statistics.fmean(known) if known else None,
    }
