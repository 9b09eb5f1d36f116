"""What `penstock plan` says of a plan: a verdict, a table and what is known of it."""

from pathlib import Path

from rich.table import Table

from penstock.cli.output import console, print_line, print_written, seconds
from penstock.services.acceptance.pipeline import rule_lines
from penstock.types.planned import CascadePlan, PlannedTier
from penstock.types.rules import RuleOptions
from penstock.types.simulated import UserLatency

LEFT_OUT = {
    "gpus": "with a model that fits nowhere",
    "judge": "without the tier that grades",
    "min_quality": "below the quality",
    "max_latency_s": "too slow even without load",
    "bound": "that cannot be among the two best",
    "search_s": "that there was no time for",
    "no_plan": "without a plan within the targets",
}


def show(plan: CascadePlan, rules: RuleOptions, written: list[Path]) -> None:
    """Print a plan. rules: that were asked for."""
    print_line(f"{plan.verdict}.", style="bold")
    rate = "" if plan.rate_per_s is None else f" at {plan.rate_per_s:.3g} requests/s"
    table = Table(title=f"Cascade on up to {plan.cluster}{rate}")
    for column in ("tier", "GPUs", "strategy", "processes", "answers", "p95", "load", "threshold"):
        left = column in ("tier", "strategy")
        table.add_column(column, justify="left" if left else "right", overflow="fold" if left else "ellipsis")
    for i, tier in enumerate(plan.tiers):
        threshold = "not used" if tier.threshold is None else f"{tier.threshold:.4g}"
        if tier.used and (i == len(plan.tiers) - 1 or tier.threshold == 0):
            threshold = "all"
        table.add_row(
            tier.name,
            str(tier.gpus),
            _strategy_words(tier),
            f"{tier.share_processed:.0%}",
            f"{tier.share_answered:.0%}",
            seconds(tier.p95_s) if tier.used else "-",
            f"{tier.utilisation:.0%}" if tier.used and plan.load is not None else "-",
            threshold,
        )
    console.print(table)
    lines = [
        ", ".join(f"{tier.name}: {tier.model}" for tier in plan.tiers),
        *_quality_lines(plan),
        *_alone_lines(plan),
        f"p95 of the slowest tier {seconds(plan.latency_p95_s)}, end to end {seconds(plan.end_to_end_p95_s)}",
        *([] if plan.user_latency_s is None else [felt_line(plan.user_latency_s)]),
        *_grading_lines(plan),
        *rule_lines(plan, rules),
        *_interval_lines(plan),
        f"{plan.binds}; dispatch by {plan.dispatch.value}",
        f"step times: {'; '.join(f'{tier.name} {tier.step_times}' for tier in plan.tiers if tier.used)}",
        *_band_lines(plan),
        *([cached_line(plan.cached_share)] if plan.cached_share > 0 else []),
        f"{_proof(plan)}; {plan.evaluations} routings, {plan.simulations} simulations, {plan.seconds:.1f} s",
        *_promise_lines(plan),
        *_choice_lines(plan),
        *(f"tier {name} cannot be used: {reason}" for name, reason in plan.infeasible.items()),
    ]
    console.print("\n".join(lines), highlight=False)
    if written:
        print_written(*written)


def _quality_lines(plan: CascadePlan) -> list[str]:
    if (alone := plan.alone) is None:
        return [f"quality {plan.quality:.2f}"]
    best = f", best of all {alone.most:.2f})" if alone.most > alone.last else ")"
    return [f"quality {plan.quality:.2f} (first tier alone {alone.first:.2f}, last alone {alone.last:.2f}{best}"]


def _alone_lines(plan: CascadePlan) -> list[str]:
    if (alone := plan.largest_alone) is None or plan.latency is None:
        return []
    figures = f"quality {alone.quality:.2f}, {plan.latency.words} {seconds(alone.latency_s)}"
    return [f"{alone.tier} alone within the same utilisation: {figures}; the plan may take {seconds(alone.limit_s)}"]


def felt_line(felt: UserLatency) -> str:
    """`what users feel, p50, p95 and p99: end to end ...`."""
    kinds = (
        ("end to end", felt.end_to_end),
        ("first visible token", felt.first_token),
        ("per output token", felt.pace),
    )
    figures = [f"{name} {', '.join(seconds(value) for value in (p.p50, p.p95, p.p99))}" for name, p in kinds]
    return f"p50, p95 and p99: {'; '.join(figures)}"


def cached_line(share: float) -> str:
    """What was assumed of prefix reuse."""
    return f"prefix reuse: {share:.1%} of the prompt tokens are cached, as in the trace; ignore_cached computes all"


def _strategy_words(tier: PlannedTier) -> str:
    if tier.remote is not None:
        return f"remote, {tier.remote.dollars_per_hour:,.2f} dollars/hour for tokens"
    return strategy_of(tier)


def strategy_of(tier: PlannedTier) -> str:
    """`2 x TP=4; 1 x TP=8`; `remote` for a tier that an API serves."""
    from penstock.services.domain.hardware import replica_words

    return "remote" if tier.remote is not None else replica_words(tier.replicas) or "-"


def _proof(plan: CascadePlan) -> str:
    """What is known of better plans: over routings at the judged scores, and the replica mixes that are searched."""
    assert plan.optimality is not None
    proof, gap, step = plan.optimality.proof, plan.optimality.gap, plan.optimality.gpu_step
    if proof == "enumerated":
        text = "the best of what is searched: every routing that meets the targets was tried"
    elif proof == "bounded":
        text = "the best of what is searched: no other routing can be better, even with each request alone"
    elif gap is None:
        text = "not proved: how far the best plan may be is unknown"
    elif plan.goal.value == "quality":
        text = f"not proved: the best plan has at most {gap:.2f} points more"
    else:
        better = "cheaper" if plan.goal.value == "cost" else "faster"
        text = f"not proved: the best plan is at most {gap:.0%} {better}"
    if plan.candidates is not None:
        text += f"; over all {plan.candidates.cascades} cascades"
    return text if step == 1 else f"{text}; counts of GPUs up to {step} apart"


def _choice_lines(plan: CascadePlan) -> list[str]:
    """From what the tiers were chosen, and the best plan of other tiers."""
    choice = plan.candidates
    if choice is None:
        return []
    least, most = choice.min_tiers, choice.max_tiers
    sizes = f"{least} to {most} tiers" if least < most else f"{most} tier{'' if most == 1 else 's'}"
    left_out = [f"{count} {LEFT_OUT[why]}" for why, count in choice.left_out.items() if count]
    considered = f"{choice.cascades} cascades of {sizes}, {choice.planned} with a plan"
    line = f"chosen from {', '.join(choice.tiers)}: {considered}"
    lines = [f"{line}; left out: {', '.join(left_out)}" if left_out else line]
    if (other := choice.runner_up) is None:
        return [*lines, "runner-up: none, no other plan serves in another way"]
    rate = "" if plan.goal.value != "rate" or other.rate_per_s is None else f", {other.rate_per_s:.3g} requests/s"
    words = "" if plan.latency is None else plan.latency.words
    figures = f"quality {other.quality:.2f}, {words} {seconds(other.latency_p95_s)}, {other.cost.words}{rate}"
    by = " by a predictor" if other.routed else ""
    return [*lines, f"runner-up: {(' or ' if other.routed else ' + ').join(other.tiers)}{by}, {figures}"]


def _grading_lines(plan: CascadePlan) -> list[str]:
    if (judging := plan.grading) is None:
        return []
    per_s = judging.requests_per_s
    how_many = f"{judging.requests:,} answers" if per_s is None else f"{per_s:.3g} answers/s"
    return [f"judging: {judging.by} scores {how_many}, each within {seconds(judging.wait_s.p95)} (p95)"]


def _interval_lines(plan: CascadePlan) -> list[str]:
    if (horizon := plan.horizon) is None or plan.latency is None:
        return []
    interval, latencies, of_run = plan.latency.interval_s, horizon.latencies or 0.0, horizon.run_latencies or 0.0
    made_for = f"made for {horizon.requests:,} requests in {horizon.seconds:,.0f} s, {latencies:,.0f} latencies"
    if interval is None:
        return [made_for]
    spread = f"{plan.latency.words} {seconds(interval.mean)} ({seconds(interval.low)} to {seconds(interval.high)})"
    return [f"{made_for}; on {interval.runs} other stretches of the trace, of {of_run:,.0f} latencies, {spread}"]


def _band_lines(plan: CascadePlan) -> list[str]:
    if plan.latency is None or (band := plan.latency.band) is None:
        return []
    line = f"{plan.latency.words} over these times {seconds(band.fast_s)} to {seconds(band.slow_s)}"
    if not band.missed:
        return [line]
    if (cost := band.kept_for) is None:
        return [f"{line}; no plan was found that keeps the target up to there"]
    return [f"{line}; the target is kept up to there with {cost.words}"]


def _promise_lines(plan: CascadePlan) -> list[str]:
    promise = plan.promise
    if promise is None:
        return []
    less = promise.expected_quality - promise.least_quality
    return [
        f"on new prompts: quality {promise.expected_quality:.2f}, with a confidence of {promise.confidence:.0%} at least "
        f"{promise.least_quality:.2f}; judged on {promise.prompts:,} prompts: ±{less:.1f} points"
    ]
