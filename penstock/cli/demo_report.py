"""What `penstock demo` reports: the content of demo.json, and the tables. Pure but for printing."""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.cli.demo_run import Failover
from penstock.cli.held_out import final_answer
from penstock.cli.output import seconds
from penstock.cli.replay import Outcome, Run
from penstock.client.types import Reply

SHOWN_REQUESTS = 8
PLAIN = "no skips"  # the run of the cascade in which no tier is passed over
CHECKED = "checked"  # the run of the cascade with early checks


def run_figures(run: Run, limit_s: float) -> dict[str, Any]:
    """The figures of one run. goodput_per_s: answers within `limit_s` of their arrival, right or wrong, per second."""
    answered = run.answered
    latencies = sorted(outcome.latency_s for outcome, _ in answered)
    return {
        "accuracy": accuracy(run.outcomes),
        "failed": len(run.outcomes) - len(answered),
        "mean_latency_s": statistics.fmean(latencies) if latencies else None,
        "p95_latency_s": percentile(latencies, 0.95),
        "tokens_per_s": sum(reply.usage.output_tokens for _, reply in answered) / run.seconds,
        "cpu_s_per_answer": run.cpu_s / len(answered) if answered else None,
        "goodput_per_s": sum(latency_s <= limit_s for latency_s in latencies) / run.seconds,
    }


def figures_of(
    tiers: Sequence[str],
    runs: Mapping[str, Run],
    failover: Failover,
    *,
    concurrency: int,
    rate_per_s: float,
    sustained_per_s: float,
    limit_s: float,
) -> dict[str, Any]:
    """The content of demo.json. runs: by tier, `cascade`, PLAIN if the mesh passes tiers over, and CHECKED if there are early
    checks; all of them of the same questions and arrivals.

    sustained_per_s: by the last tier alone. limit_s: an answer that takes longer does not count for the goodput.
    """
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
        "sustained_per_s": sustained_per_s,
        "latency_limit_s": limit_s,
        "tiers": by_tier,
        "cascade": {
            **run_figures(cascade, limit_s),
            "ttft_p50_s": percentile(ttft_s, 0.5),
            "ttft_p95_s": percentile(ttft_s, 0.95),
        },
        "failover": dataclasses.asdict(failover),
        "requests": [_request(outcome) for outcome in cascade.outcomes],
        "escalation_drafts": escalation_drafts(cascade),
        "skipping": skipping(tiers, cascade, runs[PLAIN]) if PLAIN in runs else None,
        "early_checks": early_checks(cascade, runs[CHECKED]) if CHECKED in runs else None,
    }
    return figures | {"saved": savings_sentence(figures)}


def escalation_drafts(run: Run) -> dict[str, int]:
    """Tokens of the answers of tiers that were given a rejected answer as a draft, and the drafted ones among them.

    An accepted token took no forward pass of its own; a rejected one was verified in vain.
    """
    usages = [tier.usage for _, reply in run.answered for tier in reply.tiers[1:]]
    return {
        "output_tokens": sum(usage.output_tokens for usage in usages),
        "accepted_tokens": sum(usage.accepted_draft_tokens for usage in usages),
        "rejected_tokens": sum(usage.rejected_draft_tokens for usage in usages),
    }


def skipping(tiers: Sequence[str], cascade: Run, plain: Run) -> dict[str, Any]:
    """What skip prediction did. passed_over: tiers, over all requests. tokens_in_vain: of answers that were rejected."""
    return {
        "passed_over": sum(_passed_over(tiers, reply) for _, reply in cascade.answered),
        "tokens_in_vain": tokens_in_vain(cascade),
        "tokens_in_vain_without": tokens_in_vain(plain),
        "accuracy_without": accuracy(plain.outcomes),
    }


def early_checks(cascade: Run, checked: Run) -> dict[str, Any]:
    """What early checks did. rejected: answers, before they were finished. tokens_in_vain: of rejected answers."""
    tiers = [tier for _, reply in checked.answered for tier in reply.tiers]
    return {
        "rejected": sum(tier.score_reason == "rejected_early" for tier in tiers),
        "tokens_in_vain": tokens_in_vain(checked),
        "tokens_in_vain_without": tokens_in_vain(cascade),
        "accuracy": accuracy(checked.outcomes),
        "cpu_s_per_answer": checked.cpu_s / len(checked.answered) if checked.answered else None,
    }


def tokens_in_vain(run: Run) -> int:
    """Output tokens of answers that were rejected."""
    return sum(t.usage.output_tokens for _, reply in run.answered for t in reply.tiers if t.tier != reply.tier)


def _passed_over(tiers: Sequence[str], reply: Reply) -> int:
    """How many tiers before the one that answered were not asked."""
    return len(set(tiers[: tiers.index(reply.tier)]) - {tier.tier for tier in reply.tiers})


def skipping_sentence(figures: Mapping[str, Any]) -> str:
    """What skip prediction saved."""
    change = _tokens_instead(figures)
    right = "unknown" if figures["accuracy_without"] is None else f"{figures['accuracy_without']:.0%} right"
    return f"Skip prediction passed {figures['passed_over']} tiers over: {change}; without it {right}."


def early_checks_sentence(figures: Mapping[str, Any]) -> str:
    """What early checks saved in addition."""
    right = "unknown" if figures["accuracy"] is None else f"{figures['accuracy']:.0%} right"
    ended = f"{figures['rejected']} answer{'' if figures['rejected'] == 1 else 's'} ended early"
    return f"With early checks in addition, {ended}: {_tokens_instead(figures)}; {right}."


def _tokens_instead(figures: Mapping[str, Any]) -> str:
    tokens, without = figures["tokens_in_vain"], figures["tokens_in_vain_without"]
    change = f"{tokens:,} tokens of rejected answers instead of {without:,}"
    if without:
        change += f" ({1 - tokens / without:.0%} fewer)" if tokens <= without else f" ({tokens / without - 1:.0%} more)"
    return change


def drafts_sentence(drafts: Mapping[str, int]) -> str:
    """What escalation drafts saved, in at most 80 columns."""
    if not drafts["output_tokens"]:
        return "No answer was escalated, so none was a draft."
    accepted, tokens = drafts["accepted_tokens"], drafts["output_tokens"]
    return f"Drafts: {accepted:,} of {tokens:,} tokens of escalated answers took no pass of their own."


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
    for name in ("", "right", "CPU/answer", "mean time", "p95", "in time/s"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for tier in figures["tiers"]:
        table.add_row(f"{tier['name']} alone", *_cells(tier))
    table.add_section()
    table.add_row(*(f"[bold]{cell}[/]" for cell in ("cascade", *_cells(figures["cascade"]))))
    console.print(table)
    parts = [
        f"{tier['name']} {tier['share_answered']:.0%}"
        + ("" if tier["accuracy_where_answered"] is None else f" ({tier['accuracy_where_answered']:.0%} right)")
        for tier in figures["tiers"]
    ]
    cascade, failover = figures["cascade"], figures["failover"]
    lines = [
        f"The cascade's answers came from {', '.join(parts)}. First token: {seconds(cascade['ttft_p50_s'])} at the "
        f"median, {seconds(cascade['ttft_p95_s'])} at p95. In time is within {seconds(figures['latency_limit_s'])}.",
        failover_sentence(failover),
        drafts_sentence(figures["escalation_drafts"]),
        *([skipping_sentence(figures["skipping"])] if figures["skipping"] else []),
        *([early_checks_sentence(figures["early_checks"])] if figures["early_checks"] else []),
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
    )


def _cut(text: str, length: int) -> str:
    line = " ".join(text.split()).replace("[", "\\[")
    return line if len(line) <= length else f"{line[: length - 1]}…"
