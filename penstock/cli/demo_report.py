"""What `penstock demo` reports: the content of demo.json, and the tables. Pure but for printing."""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.cli.demo_run import Failover, Pace
from penstock.cli.held_out import final_answer
from penstock.cli.output import seconds
from penstock.cli.replay import Outcome, Run

SHOWN_REQUESTS = 8
LIMIT_TIMES = 5.0  # an answer is in time within so many times what the last tier takes for a request without others
PLAIN = "no skips"
"""A further run of the cascade, in which no tier is passed over."""


def run_figures(run: Run, limit_s: float) -> dict[str, Any]:
    """The figures of one run. goodput_per_s: answers within `limit_s` of their arrival, right or wrong, per second.

    tokens_in_vain: of rejected answers. drafted_tokens: accepted ones of rejected answers, which took no pass of their own.
    """
    answered = run.answered
    latencies = sorted(outcome.latency_s for outcome, _ in answered)
    tiers = [(tier, reply) for _, reply in answered for tier in reply.tiers]
    return {
        "accuracy": accuracy(run.outcomes),
        "failed": len(run.outcomes) - len(answered),
        "mean_latency_s": statistics.fmean(latencies) if latencies else None,
        "p95_latency_s": percentile(latencies, 0.95),
        "tokens_per_s": sum(reply.usage.output_tokens for _, reply in answered) / run.seconds,
        "cpu_s_per_answer": run.cpu_s / len(answered) if answered else None,
        "goodput_per_s": sum(latency_s <= limit_s for latency_s in latencies) / run.seconds,
        "tokens_in_vain": sum(tier.usage.output_tokens for tier, reply in tiers if tier.tier != reply.tier),
        "drafted_tokens": sum(tier.usage.accepted_draft_tokens for tier, _ in tiers),
    }


def figures_of(
    tiers: Sequence[str],
    runs: Mapping[str, Run],
    failover: Failover,
    pace: Pace,
    *,
    concurrency: int,
    rate_per_s: float,
) -> dict[str, Any]:
    """The content of demo.json. runs: by tier, `cascade`, and further ones of the cascade; all of the same questions and
    arrivals. pace: of the last tier alone.
    """
    limit_s = LIMIT_TIMES * pace.lone_s
    cascade = runs["cascade"]
    answered = cascade.answered
    answered_by = Counter(reply.tier for _, reply in answered)
    ttft_s = sorted(reply.ttft_s or 0.0 for _, reply in answered)
    by_tier = [
        {
            "name": name,
            **run_figures(runs[name], limit_s),
            "share_answered": answered_by[name] / max(1, len(answered)),
            "accuracy_where_answered": accuracy([outcome for outcome, reply in answered if reply.tier == name]),
        }
        for name in tiers
    ]
    figures = {
        "prompts": len(cascade.outcomes),
        "concurrency": concurrency,
        "rate_per_s": rate_per_s,
        "sustained_per_s": pace.sustained_per_s,
        "latency_limit_s": limit_s,
        "tiers": by_tier,
        "cascade": {
            **run_figures(cascade, limit_s),
            "ttft_p50_s": percentile(ttft_s, 0.5),
            "ttft_p95_s": percentile(ttft_s, 0.95),
        },
        "variants": {name: run_figures(run, limit_s) for name, run in runs.items() if name == PLAIN},
        "failover": dataclasses.asdict(failover),
        "requests": [_request(outcome) for outcome in cascade.outcomes],
    }
    return figures | {"saved": savings_sentence(figures)}


def _request(outcome: Outcome) -> dict[str, Any]:
    question, reply = outcome.question, outcome.reply
    return {
        "task": question.task,
        "level": question.level,
        "prompt": question.text,
        "expected": question.answer,
        "answer": final_answer(reply.text) if reply is not None else None,
        "correct": outcome.correct,
        "tier": reply.tier if reply is not None else None,
        "latency_s": outcome.latency_s,
        "scores": {t.tier: t.score for t in reply.tiers if t.score is not None} if reply is not None else {},
        **({"error": outcome.error} if outcome.error else {}),
    }


def savings_sentence(figures: Mapping[str, Any]) -> str:
    """What the cascade saved compared with the last tier alone, in one sentence; also if it saved nothing."""
    largest, cascade = figures["tiers"][-1], figures["cascade"]
    if not largest["cpu_s_per_answer"] or not cascade["cpu_s_per_answer"]:
        return "What the cascade saved is unknown: the CPU time of too few answers was measured."
    share = cascade["cpu_s_per_answer"] / largest["cpu_s_per_answer"]
    saved = round(100 * (1 - share))
    if saved >= 1:
        text = f"The cascade saved {saved} % of the CPU time that {largest['name']} alone takes"
    else:
        text = f"The cascade saved no CPU time: it used {share:.2f} times that of {largest['name']} alone"
    points = 100 * (cascade["accuracy"] - largest["accuracy"])
    if abs(points) < 0.05:
        return f"{text}, at the same accuracy."
    return f"{text}, and was right {abs(points):.1f} points {'more' if points > 0 else 'less'} often."


def accuracy(outcomes: Sequence[Outcome]) -> float | None:
    """The share of right answers; a request that failed counts as wrong. None without outcomes."""
    return sum(o.correct for o in outcomes) / len(outcomes) if outcomes else None


def percentile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def show(figures: Mapping[str, Any], out: Path, console: Console) -> None:
    """Print the figures in at most 80 columns."""
    largest = figures["tiers"][-1]["name"]
    share = figures["rate_per_s"] / figures["sustained_per_s"]
    table = Table(
        title=f"{figures['prompts']} held-out prompts, {figures['rate_per_s']:.1f}/s ({share:.0%} of what {largest} sustains)"
    )
    for name in ("", "right", "CPU/answer", "mean time", "p95", "in time/s", "in vain"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for tier in figures["tiers"]:
        table.add_row(f"{tier['name']} alone", *_cells(tier))
    table.add_section()
    table.add_row(*(f"[bold]{cell}[/]" for cell in ("cascade", *_cells(figures["cascade"]))))
    for name, variant in figures["variants"].items():
        table.add_row(name, *_cells(variant))
    console.print(table)
    parts = [
        f"{tier['name']} {tier['share_answered']:.0%}"
        + ("" if tier["accuracy_where_answered"] is None else f" ({tier['accuracy_where_answered']:.0%} right)")
        for tier in figures["tiers"]
    ]
    cascade, failover = figures["cascade"], figures["failover"]
    lines = [
        f"The cascade's answers came from {', '.join(parts)}. First token: {seconds(cascade['ttft_p50_s'])} at the "
        f"median, {seconds(cascade['ttft_p95_s'])} at p95. In time is within {seconds(figures['latency_limit_s'])}; in vain "
        f"are tokens of rejected answers, {cascade['drafted_tokens']:,} of which served as drafts.",
        failover_sentence(failover),
        f"[bold]{figures['saved']}[/]",
    ]
    for line in lines:
        console.print(line, highlight=False)
    sample = Table(box=None, header_style="dim")
    for name in ("prompt", "answer", "tier", "scores"):
        sample.add_column(name, overflow="ellipsis", no_wrap=True)
    for request in figures["requests"][:SHOWN_REQUESTS]:
        scores = ", ".join(f"{score:.0f}" for score in request["scores"].values())
        mark = "[green]✓[/] " if request["correct"] else "[red]✗[/] "
        sample.add_row(
            _cut(request["prompt"], 36), mark + _cut(request["answer"] or "-", 18), request["tier"] or "-", scores
        )
    console.print(sample)
    console.print(f"All figures: {out}", highlight=False, soft_wrap=True)


def failover_sentence(failover: Mapping[str, Any]) -> str:
    """What happened when a worker was killed."""
    if not failover["worker"]:
        return "No worker was killed: no request reached one."
    lost = failover["requests"] - failover["answered"]
    end = "nothing was lost" if not lost else f"{lost} were lost"
    return (
        f"{failover['worker']} was killed under {failover['requests']} requests: {failover['answered']} were answered, "
        f"{failover['elsewhere']} of them elsewhere, within {seconds(failover['longest_s'])}; {end}."
    )


def _cells(figures: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{figures['accuracy']:.0%}",
        seconds(figures["cpu_s_per_answer"]),
        seconds(figures["mean_latency_s"]),
        seconds(figures["p95_latency_s"]),
        f"{figures['goodput_per_s']:.1f}",
        f"{figures['tokens_in_vain']:,}",
    )


def _cut(text: str, length: int) -> str:
    line = " ".join(text.split()).replace("[", "\\[")
    return line if len(line) <= length else f"{line[: length - 1]}…"
