"""`penstock measure`: have every tier answer prompts and the judge score them, for the planner's quality file."""

import asyncio
import contextlib
import csv
import json as json_module
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import options, targets
from penstock.cli.held_out import Question, read_questions
from penstock.cli.output import (
    cli_error_handling,
    console,
    fail,
    failing_on,
    needs_extra,
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
from penstock.client.types import Options, Reply
from penstock.question_files.errors import FileError
from penstock.types.replies import FinishReason

RIGHT = 50.0  # the least score of a right answer
REPLY_S = (
    3600.0  # the deadline of a reply: on CPUs long ones take many minutes, and what was measured before would be lost
)


@dataclass(frozen=True, slots=True)
class _Scored:
    """by_scorer: of those that scored it."""

    question: Question
    reply: Reply
    score: float
    refused: bool
    good: bool
    by_scorer: dict[str, float]


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
        with failing_on(FileError, status=2):
            questions = read_questions(prompts)
    known = all(question.answer is not None for question in questions)
    if labelled is not None and not known:
        fail(f"{prompts}: --labelled needs an answer with every prompt", 2)
    if labelled is not None and any(not isinstance(question.prompt, str) for question in questions):
        fail(f"{prompts}: --labelled needs prompts of one message: samples for calibration hold no chats", 2)
    if predictor is not None:
        _check_predictable(questions)
    generation = Options(temperature=0, max_tokens=max_tokens, top_logprobs=0)
    with cli_error_handling(routers):
        measured = _measure(routers, listeners, questions, generation, (scorer, right_by), concurrency, quiet=json)
        scores, seconds = asyncio.run(measured)
    _write_quality(out, scores, {}, known=known)  # also where training fails
    trained = None
    if predictor is not None:
        predicted, trained = _trained(predictor, questions, scores)
        _write_quality(out, scores, predicted, known=known)
    if labelled is not None:
        _write_labelled(labelled, scores)
    figures = [_figures(tier, scored) for tier, scored in scores.items()]
    tiers = [
        MeasuredTier(tier, seconds[tier], [each.good for each in scored], _by_scorer(scored))
        for tier, scored in (scores.items() if known else ())
    ]
    worths, proposal = [each for tier in tiers[:-1] for each in worth(tier)], propose(tiers) if tiers else None
    if json:
        shown: dict[str, Any] = {"prompts": len(questions), "out": str(out), "tiers": figures}
        if proposal is not None:
            shown |= {"scorers": worths, "proposal": proposal}
        print_json(shown if trained is None else shown | {"predictor": trained})
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
                listed, default = await judge.scorers()
                chosen, right_by = scorers[0] or default, scorers[1]
                compared = [each.name for each in listed if each.name != chosen and not each.needs_reference]
                if any(question.answer is None for question in questions):
                    compared = []

                async def reply_of(tier: str, question: Question) -> Reply:
                    async with slots:
                        reply = await client.generate(question.prompt, generation, model=tier, timeout_s=REPLY_S)
                    bars.advance(bar)
                    return reply

                async def scored(question: Question, reply: Reply) -> _Scored:
                    async with slots:
                        return await _scored(judge, question, reply, [chosen, *compared], right_by)

                scores, seconds, loop = dict[str, list[_Scored]](), dict[str, float](), asyncio.get_running_loop()
                for tier in status.tiers:
                    began_s = loop.time()
                    replies = await asyncio.gather(*(reply_of(tier.name, question) for question in questions))
                    seconds[tier.name] = (loop.time() - began_s) / len(questions)
                    scores[tier.name] = await asyncio.gather(*map(scored, questions, replies))
                return scores, seconds


async def _scored(
    judge: AsyncJudge, question: Question, reply: Reply, scorers: Sequence[str], right_by: str
) -> _Scored:
    """An answer that was cut off is never good. scorers: the one that is measured, and others, which may have no score."""
    answered = Answered(question.prompt, reply, question.answer)
    (verdict,) = await judge.verdicts([answered], scorers[0])
    by_scorer = {scorers[0]: verdict.score}
    for name in scorers[1:]:
        with contextlib.suppress(PenstockError):
            by_scorer[name] = (await judge.score([answered], name))[0]
    good = reply.finish_reason is FinishReason.STOP
    if good and right_by:
        good = (await judge.score([answered], right_by))[0] >= RIGHT
    elif good:
        good = question.answered_by(reply.text)
    return _Scored(question, reply, verdict.score, bool(verdict.reason), good, by_scorer)


def _by_scorer(scored: Sequence[_Scored]) -> dict[str, Sequence[float]]:
    """The scores of those that scored every answer."""
    complete = [name for name in scored[0].by_scorer if all(name in each.by_scorer for each in scored)]
    return {name: [each.by_scorer[name] for each in scored] for name in complete}


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


def _write_quality(
    path: Path, scores: dict[str, list[_Scored]], predicted: dict[str, Sequence[float]], *, known: bool
) -> None:
    """Write the quality file. predicted: scores by tier; empty without a predictor.

    known: with the right answer of every prompt: an answer's quality is 100 if it is right, else 0.
    """
    columns = ["prompt_id", "input_tokens"]
    own = ("output_tokens", "judge_score", "refused", *(("quality",) if known else ()))
    columns += [f"{tier}_{what}" for tier in scores for what in own]
    columns += [f"{tier}_predicted_score" for tier in predicted]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for i, row in enumerate(zip(*scores.values(), strict=True)):
            cells: list[object] = [f"p{i}", row[0].reply.usage.prompt_tokens]
            for scored in row:
                cells += [scored.reply.usage.output_tokens, f"{scored.score:.6g}", int(scored.refused)]
                cells += [100 if scored.good else 0] if known else []
            writer.writerow([*cells, *(f"{column[i]:.4g}" for column in predicted.values())])


def _write_labelled(path: Path, scores: dict[str, list[_Scored]]) -> None:
    with path.open("w") as file:
        for tier, answers in scores.items():
            for answer in answers:
                values = [position.chosen.logprob for position in answer.reply.logprobs]
                row: dict[str, Any] = {
                    "prompt": answer.question.text,
                    "answer": answer.reply.text,
                    "good": answer.good,
                    "reference": answer.question.answer,
                    "tier": tier,
                    "finish_reason": answer.reply.finish_reason.value,
                }
                if values:
                    row |= {"mean_logprob": statistics.fmean(values), "min_logprob": min(values)}
                file.write(json_module.dumps(row) + "\n")


def _figures(tier: str, scored: list[_Scored]) -> dict[str, Any]:
    correct = [answer.good for answer in scored if answer.question.answer is not None]
    return {
        "tier": tier,
        "mean_score": statistics.fmean(answer.score for answer in scored),
        "mean_output_tokens": statistics.fmean(answer.reply.usage.output_tokens for answer in scored),
        "right": statistics.fmean(correct) if correct else None,
    }
