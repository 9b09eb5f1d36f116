"""What `penstock plan` says of a plan: a verdict, a table and what is known of it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from penstock.cli.output import console, print_written, seconds

if TYPE_CHECKING:
    from penstock.client.plans import BurstLadder as ClientLadder
    from penstock.client.plans import BurstStep as ClientStep
    from penstock.client.plans import LongAnswers as ClientLongAnswers
    from planner_service.cascade_plan import CascadePlan, Felt
    from planner_service.deployment.search import Strategy
    from planner_service.site import Demand, Site
    from planner_service.verdict import NextStep
    from services.domain.bursts import BurstLadder, BurstStep
    from services.domain.long_answers import LongAnswers


BEST_ANSWER = "delivered: the answer with the highest score of those that a request has got"
LEFT_OUT = {
    "gpus": "with a model that fits nowhere",
    "judge": "without the tier that grades",
    "min_quality": "below the quality",
    "max_latency_s": "too slow even without load",
    "bound": "that cannot be among the two best",
    "no_plan": "without a plan within the targets",
}


def show(
    plan: "CascadePlan",
    unguaranteed: "CascadePlan",
    site: "Site",
    demand: "Demand",
    took_s: float,
    written: list[Path],
    step: "NextStep | None",
) -> None:
    """Print a plan. unguaranteed: the one without --confidence. step: what more quality takes."""
    from planner_service.verdict import verdict

    console.print(f"{verdict(site, plan, step)}.", highlight=False, soft_wrap=True, style="bold")
    table = Table(title=_title(plan, site))
    for column in ("tier", "GPUs", "strategy", "processes", "answers", "p95", "load", "threshold"):
        left = column in ("tier", "strategy")
        table.add_column(column, justify="left" if left else "right", overflow="fold" if left else "ellipsis")
    for i, (tier, utilisation) in enumerate(zip(plan.tiers, plan.utilisation, strict=True)):
        threshold = "all" if i == len(plan.thresholds) else f"{plan.thresholds[i]:.4g}"
        if not tier.strategy.used:
            threshold = "not used"
        table.add_row(
            tier.name,
            str(tier.gpus),
            _strategy_words(tier.strategy),
            f"{tier.share_processed:.0%}",
            f"{tier.share_answered:.0%}",
            seconds(tier.p95_s) if tier.strategy.used else "-",
            f"{utilisation:.0%}" if tier.strategy.used and plan.load is not None else "-",
            threshold,
        )
    console.print(table)
    lines = [
        ", ".join(f"{tier.name}: {tier.model}" for tier in plan.tiers),
        f"quality {plan.quality:.2f} (first tier alone {demand.judged.worst:.2f}, last alone {demand.judged.best:.2f}"
        + (f", best of all {demand.judged.most:.2f})" if plan.best_answer else ")"),
        f"p95 of the slowest tier {seconds(plan.latency_p95_s)}, end to end {seconds(plan.end_to_end_p95_s)}",
        felt_line(plan.felt),
        *_grading_lines(plan, site),
        *([BEST_ANSWER] if plan.best_answer else []),
        *_skip_lines(plan),
        *_long_answers_lines(plan),
        *_early_lines(plan),
        *([f"no burst ladder: {plan.burst_reason}"] if plan.burst_reason else []),
        *_interval_lines(plan),
        f"{plan.binds}; dispatch by {plan.dispatch.value}",
        f"step times: {_step_times_words(plan, site)}",
        *([cached_line(plan.cached_share)] if plan.cached_share > 0 else []),
        f"{_proof(plan)}; {plan.solution.evaluations} routings, {plan.simulations} simulations, {took_s:.1f} s",
        *_promise_lines(plan, unguaranteed),
        *_choice_lines(plan),
        *(f"tier {name} cannot be used: {reason}" for name, reason in plan.infeasible.items()),
    ]
    console.print("\n".join(lines), highlight=False)
    if plan.burst is not None:
        console.print(burst_table(plan.burst, site.tiers))
    if written:
        print_written(*written)


def felt_line(felt: "Felt") -> str:
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
    return f"prefix reuse: {share:.1%} of the prompt tokens are cached, as in the trace; --ignore-cached computes all"


def burst_table(ladder: "BurstLadder | ClientLadder", tiers: Sequence[str]) -> Table:
    """The steps by which thresholds give way. tiers: of the plan, in order."""
    table = Table(title=f"Burst ladder, whose mean quality holds {ladder.mean_quality:g}", title_justify="left")
    table.add_column("step", justify="right")
    for tier in tiers[:-1]:
        table.add_column(tier, justify="right")
    for column in ("quality", "up to, requests/s", "limited by"):
        table.add_column(column, justify="left" if column == "limited by" else "right")
    steps: Sequence[BurstStep | ClientStep] = ladder.steps
    for i, step in enumerate(steps):
        rules = [_rule(rule.score, rule.tie_share) for rule in step.thresholds]
        table.add_row(str(i), *rules, f"{step.quality:.2f}", f"{step.rate_per_s:.3g}", step.tier)
    return table


def _rule(score: float, tie_share: float) -> str:
    """`70`; `70, 25 % of ties` where only a part of the answers that score 70 are accepted."""
    if score > 100:
        return "not used"
    return f"{score:.4g}" if tie_share == 1 else f"{score:.4g}, {tie_share:.0%} of ties"


def _strategy_words(strategy: "Strategy") -> str:
    dollars = strategy.remote_dollars_per_hour
    return f"remote, {dollars:,.2f} dollars/hour for tokens" if strategy.remote is not None else str(strategy)


def _step_times_words(plan: "CascadePlan", site: "Site") -> str:
    """Where the step times of each used tier are from: `small estimated in 16bit, large profiled`."""
    from planner_service.step_times import step_times

    used = [(i, tier) for i, tier in enumerate(plan.tiers) if tier.strategy.used]
    sources = ((tier.name, step_times(site, i, (r.shape for r, _ in tier.strategy.replicas))) for i, tier in used)
    return "; ".join(f"{name} {source}" for name, source in sources)


def _title(plan: "CascadePlan", site: "Site") -> str:
    rate = "" if plan.rate_per_s is None else f" at {plan.rate_per_s:.3g} requests/s"
    return f"Cascade on up to {_cluster_words(site)}{rate}"


def _cluster_words(site: "Site") -> str:
    """`32 x h100`, `16 x h100, 32 x l4-spot`."""
    return ", ".join(f"{each.gpus} x {each.name or each.gpu.name}" for each in site.types)


def _proof(plan: "CascadePlan") -> str:
    """What is known of better plans: over routings at the judged scores, and the replica mixes that are searched."""
    proof, gap = plan.solution.proof.value, plan.solution.gap
    if proof == "enumerated":
        text = "the best of what is searched: every routing that meets the targets was tried"
    elif proof == "bounded":
        text = "the best of what is searched: no other routing can be better, even with each request alone"
    elif gap is None:
        text = "not proved: how far the best plan may be is unknown"
    elif plan.goal.value == "quality":
        text = f"not proved: the best plan has at most {gap:.2f} points more"
    else:
        text = f"not proved: the best plan is at most {gap:.0%} faster"
    if plan.choice is not None:
        text += f"; over all {plan.choice.considered} cascades"
    return text if plan.gpu_step == 1 else f"{text}; counts of GPUs up to {plan.gpu_step} apart"


def _choice_lines(plan: "CascadePlan") -> list[str]:
    """From what the tiers were chosen, and the best plan of other tiers."""
    choice = plan.choice
    if choice is None:
        return []
    least, most = choice.sizes
    sizes = f"{least} to {most} tiers" if least < most else f"{most} tier{'' if most == 1 else 's'}"
    left_out = [f"{count} {LEFT_OUT[why.value]}" for why, count in choice.left_out.items()]
    considered = f"{choice.considered} cascades of {sizes}, {choice.planned} with a plan"
    line = f"chosen from {', '.join(choice.candidates)}: {considered}"
    lines = [f"{line}; left out: {', '.join(left_out)}" if left_out else line]
    if (other := choice.runner_up) is None:
        return [*lines, "runner-up: none, the plans of all other cascades are served by the same tiers"]
    cost = f"{other.gpus} GPUs" + (
        "" if other.dollars_per_hour is None else f", {other.dollars_per_hour:,.2f} dollars per hour"
    )
    rate = "" if plan.goal.value != "rate" or other.rate_per_s is None else f", {other.rate_per_s:.3g} requests/s"
    figures = f"quality {other.quality:.2f}, {plan.latency_words} {seconds(other.latency_s)}, {cost}{rate}"
    return [*lines, f"runner-up: {' + '.join(other.tiers)}, {figures}"]


def _grading_lines(plan: "CascadePlan", site: "Site") -> list[str]:
    report, grading = plan.grading, site.grading
    if report is None or grading is None:
        return []
    by = site.tiers[grading.tier] if grading.by_tier else grading.model
    how_many = f"{report.requests:,} answers" if report.per_s is None else f"{report.per_s:.3g} answers/s"
    return [f"judging: {by} scores {how_many}, each within {seconds(report.wait.p95)} (p95)"]


def _skip_lines(plan: "CascadePlan") -> list[str]:
    if not plan.skip_below:
        return []
    limits = [
        f"{tier.name} below {limit:g}"
        for tier, limit in zip(plan.tiers, plan.skip_below, strict=False)
        if limit is not None
    ]
    return [f"passed over by predicted score: {', '.join(limits) or 'no tier, which would not help'}"]


def long_answers_line(rules: Iterable[tuple[str, "LongAnswers | ClientLongAnswers | None"]]) -> str:
    """rules: the name of each tier, and its rule."""
    words = [
        f"{tier} of {rule.from_tokens} tokens from score {rule.threshold:.4g}"
        for tier, rule in rules
        if rule is not None
    ]
    return f"long answers accepted: {', '.join(words) or 'by score alone, length would not help'}"


def _long_answers_lines(plan: "CascadePlan") -> list[str]:
    if not plan.long_answers:
        return []
    names = [tier.name for tier in plan.tiers[:-1]]
    return [long_answers_line(zip(names, plan.long_answers, strict=True))]


def _early_lines(plan: "CascadePlan") -> list[str]:
    if not plan.early:
        return [f"early checks: {plan.early_reason}"] if plan.early_reason else []
    lines = []
    for tier, outcome in zip(plan.tiers, plan.early, strict=False):
        if not outcome.rule.checks:
            continue
        limits = ", ".join(
            f"below {check.reject_below:.3g} after {check.after_tokens}" for check in outcome.rule.checks
        )
        shares = ["no" if share is None else f"{share:.1%}" for share in (outcome.rejected, outcome.error)]
        lines.append(
            f"early checks of {tier.name}: {limits} tokens; they reject {shares[0]} of the answers that would not stand and "
            f"{shares[1]} of those that would; {outcome.saved:.0%} fewer tokens, {outcome.scored:.2g} parts scored per answer"
        )
    return lines


def _interval_lines(plan: "CascadePlan") -> list[str]:
    interval, latencies = plan.felt_interval, plan.seconds / plan.stay_s if plan.stay_s > 0 else 0.0
    made_for = f"made for {plan.requests:,} requests in {plan.seconds:,.0f} s, {latencies:,.0f} latencies"
    if interval is None:
        return [made_for]
    spread = f"{plan.latency_words} {seconds(interval.mean)} ({seconds(interval.low)} to {seconds(interval.high)})"
    return [f"{made_for}; on {interval.runs} other stretches of the trace {spread}"]


def _promise_lines(plan: "CascadePlan", unguaranteed: "CascadePlan") -> list[str]:
    promise = plan.promise
    if promise is None:
        return []
    return [
        f"guaranteed for new requests with confidence {promise.confidence:.0%}: quality {promise.tested_quality:.2f} on "
        f"{promise.tested_prompts} held-out prompts; without the guarantee p95 is {seconds(unguaranteed.latency_p95_s)}"
    ]
