"""`penstock measure`: have every tier answer prompts and the judge score them, for the planner's quality file."""

import asyncio
import csv
import json as json_module
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import options, targets
from penstock.cli.extras import needs_extra
from penstock.cli.held_out import Question, QuestionsError, read_questions
from penstock.cli.output import (
    cli_error_handling,
    console,
    fail,
    failing_on,
    print_json,
    print_line,
    print_written,
    progress,
    table_of,
)
from penstock.cli.predictor import figures_of, show_trained
from penstock.cli.proposal import MeasuredTier, Proposal, ScorerWorth, propose, worth
from penstock.client.aio import AsyncClient
from penstock.client.errors import PenstockError
from penstock.client.judging import Answered, AsyncJudge
from penstock.client.types import Options
from penstock.types.replies import FinishReason

RIGHT = 50.0  # the least score of a right answer
REPLY_S = (
    3600.0  # the deadline of a reply: on CPUs long ones take many minutes, and what was measured before would be lost
)


@dataclass(frozen=True, slots=True)
class _Scored:
    question: Question
    answered: Answered
    score: float
    refused: bool
    good: bool
    by_scorer: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class _Scorers:
    """chosen: the one that is measured. others: that are compared with it. right_by: says which answers are right; empty: the
    comparison with the expected answer does."""

    chosen: str
    others: tuple[str, ...]
    right_by: str


@needs_extra("measure --predictor", "planner")
def measure(
    prompts: Annotated[
        Path | None, typer.Argument(help="JSONL file with prompt, or the messages of a chat, and, if known, answer.")
    ] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="Use the prompts that the mesh has sampled (router.sample_prompts) instead of a file."
        ),
    ] = False,
    out: Annotated[Path, options.new_file("The quality file to write, for `penstock plan`.")] = Path("judged.csv"),
    labelled: Annotated[
        Path | None,
        options.new_file("Also write samples for the calibration of scorers; every prompt needs an answer."),
    ] = None,
    predictor: Annotated[
        Path | None,
        options.new_file(
            "Also train a score predictor, for router.score_predictor, and add predicted scores to the quality file."
        ),
    ] = None,
    scorer: Annotated[str, typer.Option(help="Scorer to use; default: the judge's default scorer.")] = "",
    right_by: Annotated[
        str,
        typer.Option(
            help="Scorer that says which answers are right, by each prompt's answer: such as one of kind code, where answers "
            "are tests. Default: answers are compared, numbers by value."
        ),
    ] = "",
    max_tokens: Annotated[int | None, options.tokens("Largest length of a reply, in tokens.")] = None,
    concurrency: Annotated[int, options.number("Prompts in flight.", 1, options.MAX_CONCURRENCY)] = 16,
    target: targets.Target = None,
    admin: targets.Admin = None,
    json: targets.Json = False,
) -> None:
    """Measure the quality of each tier on your prompts: every tier answers all of them, and the judge scores every answer."""
    if live == (prompts is not None):
        fail("give either a file of prompts or --live", 2)
    if live and labelled is not None:
        fail("--labelled needs an answer with every prompt, which the prompts of --live do not have", 2)
    routers, listeners = targets.resolve(target), targets.resolve_admin(admin)
    if prompts is None:
        questions = _live_questions(admin)
    else:
        with failing_on(QuestionsError, status=2):
            questions = read_questions(prompts)
    if labelled is not None and any(question.answer is None for question in questions):
        fail(f"{prompts}: --labelled needs an answer with every prompt", 2)
    if labelled is not None and any(not isinstance(question.prompt, str) for question in questions):
        fail(f"{prompts}: --labelled needs prompts of one message: samples for calibration hold no chats", 2)
    if predictor is not None:
        _check_predictable(questions)
    generation = Options(temperature=0, max_tokens=max_tokens, top_logprobs=0)
    with cli_error_handling(routers):
        measured = _measure(routers, listeners, questions, generation, (scorer, right_by), concurrency, quiet=json)
        scores, seconds = asyncio.run(measured)
    _write_quality(out, scores, {})  # also where training fails
    trained = None
    if predictor is not None:
        predicted, trained = _trained(predictor, questions, scores)
        _write_quality(out, scores, predicted)
    if labelled is not None:
        _write_labelled(labelled, scores)
    figures = [_figures(tier, scored) for tier, scored in scores.items()]
    tiers = [
        MeasuredTier(tier, seconds[tier], [each.good for each in scored], _by_scorer(scored))
        for tier, scored in scores.items()
        if all(each.question.answer is not None for each in scored)
    ]
    worths, proposal = [each for tier in tiers[:-1] for each in worth(tier)], propose(tiers) if tiers else None
    if json:
        shown: dict[str, Any] = {}
        if proposal:
            shown = {"scorers": [asdict(each) for each in worths], "proposal": asdict(proposal)}
        shown |= {} if trained is None else {"predictor": trained}
        print_json({"prompts": len(questions), "out": str(out), "tiers": figures} | shown)
        return
    table = table_of("tier", "mean score", "output tokens", "right", title=f"{len(questions)} prompts")
    for row in figures:
        right = "-" if row["right"] is None else f"{row['right']:.0%}"
        table.add_row(row["tier"], f"{row['mean_score']:.1f}", f"{row['mean_output_tokens']:.0f}", right)
    console.print(table)
    for each in worths:
        _show_worth(each)
    if proposal is not None:
        _show_proposal(proposal, tiers)
    if trained is not None:
        show_trained(len(questions), trained)
    print_written(out, labelled, predictor)


def _live_questions(admin: str | None) -> list[Question]:
    """The prompts that the mesh has sampled, the oldest first, each once."""
    with targets.administration(admin) as client:
        sampled = targets.all_pages(client.sampled_prompts)
    if not sampled:
        fail("the mesh has sampled no prompts yet")
    distinct = {json_module.dumps(messages): messages for messages in reversed(sampled)}
    return [Question(messages) for messages in distinct.values()]


def _check_predictable(questions: Sequence[Question]) -> None:
    """Before anything is measured."""
    from penstock.planner_service.question.score_predictor import distinct_prompts
    from penstock.services.domain.errors import InvalidRequest

    try:
        distinct_prompts([question.text for question in questions])
    except InvalidRequest as error:
        fail(f"--predictor: {error}", 2)


def _trained(
    path: Path, questions: Sequence[Question], scores: dict[str, list[_Scored]]
) -> tuple[dict[str, Sequence[float]], list[dict[str, Any]]]:
    """Write a predictor; return what prompts are expected to score, by tier, by predictors that have not seen them, and its
    figures."""
    import numpy as np

    from penstock.planner_service.question.score_predictor import train

    table = np.array([[each.score for each in scored] for scored in scores.values()]).T
    trained = train([question.text for question in questions], [*scores], table)
    path.write_text(trained.predictor.to_json())
    return dict(zip(scores, trained.predicted.T.tolist(), strict=True)), figures_of(trained, table)


async def _measure(
    routers: str,
    admin: str,
    questions: list[Question],
    generation: Options,
    scorers: tuple[str, str],
    concurrency: int,
    *,
    quiet: bool,
) -> tuple[dict[str, list[_Scored]], dict[str, float]]:
    """The scored answers by tier, in the order of the prompts, and seconds for an answer. Tiers are in the plan's order, one
    after another. scorers: that is measured (empty: the judge's default), and that says what is right."""
    slots = asyncio.Semaphore(concurrency)
    async with AsyncClient(routers, admin=admin, api_key=targets.api_key(), tls=targets.tls()) as client:
        status = await client.status()
        judge_address = next(
            (i.admin_address for i in status.instances if i.role == "judge" and i.state == "ready"), None
        )
        if judge_address is None:
            fail("the mesh has no judge that is ready")
        with progress(quiet=quiet) as bars:
            bar = bars.add_task("measuring", total=len(questions) * len(status.tiers))
            async with AsyncJudge(judge_address, tls=targets.tls()) as judge:
                used = await _scorers(judge, *scorers, compare=all(each.answer is not None for each in questions))

                async def reply_of(tier: str, question: Question) -> Answered:
                    async with slots:
                        reply = await client.generate(question.prompt, generation, model=tier, timeout_s=REPLY_S)
                    bars.advance(bar)
                    return Answered(question.prompt, reply, question.answer)

                async def scored(question: Question, answered: Answered) -> _Scored:
                    async with slots:
                        return await _scored(judge, question, answered, used)

                scores, seconds, loop = dict[str, list[_Scored]](), dict[str, float](), asyncio.get_running_loop()
                for tier in status.tiers:
                    began_s = loop.time()
                    answers = await asyncio.gather(*(reply_of(tier.name, question) for question in questions))
                    seconds[tier.name] = (loop.time() - began_s) / len(questions)
                    scores[tier.name] = await asyncio.gather(*map(scored, questions, answers))
                return scores, seconds


async def _scorers(judge: AsyncJudge, chosen: str, right_by: str, *, compare: bool) -> _Scorers:
    listed, default = await judge.scorers()
    chosen = chosen or default
    others = tuple(each.name for each in listed if each.name != chosen and compare and not each.needs_reference)
    return _Scorers(chosen, others, right_by)


async def _scored(judge: AsyncJudge, question: Question, answered: Answered, scorers: _Scorers) -> _Scored:
    """An answer that was cut off is never good. Other scorers may have no score for it."""
    (verdict,) = await judge.verdicts([answered], scorers.chosen)
    by_scorer: dict[str, float | None] = {scorers.chosen: verdict.score}
    for name in scorers.others:
        try:
            by_scorer[name] = (await judge.score([answered], name))[0]
        except PenstockError:
            by_scorer[name] = None
    good = answered.reply.finish_reason is FinishReason.STOP
    if good and scorers.right_by:
        good = (await judge.score([answered], scorers.right_by))[0] >= RIGHT
    elif good:
        good = question.answered_by(answered.reply.text)
    return _Scored(question, answered, verdict.score, bool(verdict.reason), good, by_scorer)


def _by_scorer(scored: Sequence[_Scored]) -> dict[str, Sequence[float]]:
    """The scores of those that scored every answer."""
    columns = {name: [each.by_scorer[name] for each in scored] for name in scored[0].by_scorer}
    return {name: [x for x in column if x is not None] for name, column in columns.items() if None not in column}


def _show_worth(each: ScorerWorth) -> None:
    bins = ", ".join(f"{right:.0%} of {count} up to {limit:.0f}" for limit, right, count in each.reliability)
    figure, low, high = each.auc
    line = f"{each.tier}: {each.scorer} tells right answers from wrong ones with AUC {figure:.2f} ({low:.2f} to {high:.2f})"
    print_line(f"{line}; right: {bins}")


def _show_proposal(proposal: Proposal, tiers: Sequence[MeasuredTier]) -> None:
    last = tiers[-1].name
    knows = f"a judge that accepts exactly the right answers would make it {proposal.least_cost:.2f} times {last} alone"
    if not proposal.pays:
        line = f"no cascade of these tiers pays: {last} alone is right in {proposal.last_right:.0%}; {knows}"
    else:
        limits = ", ".join(f"{tier}={limit:.3g}" for tier, limit in proposal.thresholds.items())
        figure, low, high = proposal.gained
        line = (
            f"proposed: scorer {proposal.scorer}, thresholds {limits}: right in {proposal.right:.0%} at {proposal.cost:.2f} "
            f"times the cost of {last} alone ({figure:+.1f} points, {low:+.1f} to {high:+.1f}; held out); {knows}"
        )
    print_line(line)


def _write_quality(path: Path, scores: dict[str, list[_Scored]], predicted: dict[str, Sequence[float]]) -> None:
    """Write the quality file. With the right answer of every prompt, an answer's quality is 100 if it is right, else 0.

    predicted: scores by tier; empty without a predictor.
    """
    columns = ["prompt_id", "input_tokens"]
    known = all(answer.question.answer is not None for answers in scores.values() for answer in answers)
    own = ("output_tokens", "judge_score", "refused", *(("quality",) if known else ()))
    columns += [f"{tier}_{what}" for tier in scores for what in own]
    columns += [f"{tier}_predicted_score" for tier in predicted]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for i, row in enumerate(zip(*scores.values(), strict=True)):
            cells: list[object] = [f"p{i}", row[0].answered.reply.usage.prompt_tokens]
            for scored in row:
                cells += [scored.answered.reply.usage.output_tokens, f"{scored.score:.6g}", int(scored.refused)]
                cells += [100 if scored.good else 0] if known else []
            writer.writerow([*cells, *(f"{column[i]:.4g}" for column in predicted.values())])


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
