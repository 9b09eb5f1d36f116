"""A cascade plan as JSON: what `penstock plan` writes and `penstock simulate` reads."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner_service.burst_codec import ladder_from_json, ladder_to_json
from planner_service.cascade_plan import CascadeChoice, CascadePlan, Felt, LeftOut
from planner_service.cascade_simulation import GradingReport
from planner_service.deployment.search import Strategy
from planner_service.early_checks import EarlyRule
from planner_service.early_rules import EarlyOutcome
from planner_service.files import FileError, read_site
from planner_service.mesh_tiers import mesh_ladder, mesh_tiers
from planner_service.planned_drafts import (
    PlannedDrafters,
    PlannedSpeculation,
    planned_speculation,
    with_planned_drafters,
)
from planner_service.repeated_runs import Interval
from planner_service.routing.quality import SKIPPED
from planner_service.routing.rules import RoutingRules
from planner_service.simulator import Dispatch, Percentiles, Report
from planner_service.site import Site
from planner_service.step_times import step_times
from services.domain.bursts import BurstLadder, ladder_problems
from services.domain.early_checks import EarlyCheck, early_check_problems
from services.domain.errors import FieldProblem, invalid
from services.domain.hardware import ReplicaShape
from services.domain.long_answers import LongAnswers, long_answers_problems


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What a plan was made from: paths, and how requests were drawn. max_tiers, min_tiers: see Options.

    ignore_cached: whether prompts were computed whole, whatever the trace has cached.
    """

    cluster: str
    models: str
    quality: str
    trace: str
    gpus: int | None
    requests: int
    seed: int
    lengths: str
    rate: float | None
    max_utilisation: float | None = None
    runs: int = 0
    max_tiers: int | None = None
    min_tiers: int | None = None
    ignore_cached: bool = False


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The part of a plan file that can be replayed. drafters, tiers: by tier. burst: the ladder; None without one.

    early: of the tiers but the last; empty without early checks. long_answers: likewise. best_answer: whether replies are
    the best of a request's answers.
    """

    inputs: PlanInputs
    thresholds: tuple[float, ...]
    shapes: tuple[tuple[tuple[ReplicaShape, int], ...], ...]
    dispatch: Dispatch
    skip_below: tuple[float | None, ...] = ()
    drafters: tuple[PlannedDrafters, ...] = ()
    burst: BurstLadder | None = None
    tiers: tuple[str, ...] = ()
    early: tuple[EarlyRule, ...] = ()
    long_answers: tuple[LongAnswers | None, ...] = ()
    best_answer: bool = False

    @property
    def rules(self) -> RoutingRules:
        """What its routing has besides thresholds."""
        return RoutingRules(self.skip_below, self.long_answers, self.early, self.best_answer)


def plan_json(
    plan: CascadePlan, inputs: PlanInputs, seconds: float, target: str, digest: str, site: Site
) -> dict[str, Any]:
    """Times in seconds, rates per second, quality on the scores' own scale. target, digest: see Prediction.

    site: that the plan is for; it says what drafts. A tier's `speculation` is None where nothing does.

    `optimality`: what is proved, and over what; `gap`: see Solution, None where it is unknown. A tier's `utilisation`:
    the rate offered to it over what it sustains; `busy`: the share of time in which its replicas are at work at all.
    """
    solution = plan.solution
    return {
        "thresholds": [None if h > 100 else h for h in plan.thresholds],  # None: the tier is passed over
        "burst": ladder_to_json(plan.burst),
        "burst_reason": plan.burst_reason,
        "skip_below": list(plan.skip_below or (None,) * len(plan.thresholds)),
        "long_answers": [None if rule is None else asdict(rule) for rule in plan.long_answers] or None,
        "best_answer": plan.best_answer,
        "early_checks": [_early_json(one) for one in plan.early] or None,
        "early_reason": plan.early_reason,
        "tiers": [
            {
                "name": tier.name,
                "model": tier.model,
                "gpus": tier.gpus,
                "replicas": [group_json(replica.shape, count) for replica, count in tier.strategy.replicas],
                "remote": None
                if tier.strategy.remote is None
                else {"dollars_per_hour": tier.strategy.remote_dollars_per_hour},
                "speculation": _speculation_json(planned_speculation(site, i, tier.strategy.replicas)),
                "share_processed": tier.share_processed,
                "share_answered": tier.share_answered,
                "p95_s": tier.p95_s,
                "step_times": asdict(step_times(site, i, (replica.shape for replica, _ in tier.strategy.replicas))),
                **report_json(tier.report),
                "busy": tier.report.utilisation,
                "utilisation": utilisation,
            }
            for i, (tier, utilisation) in enumerate(zip(plan.tiers, plan.utilisation, strict=True))
        ],
        "quality": plan.quality,
        "promise": None
        if plan.promise is None
        else {
            "confidence": plan.promise.confidence,
            "tested_quality": plan.promise.tested_quality,
            "tested_prompts": plan.promise.tested_prompts,
        },
        "latency_p95_s": plan.latency_p95_s,
        "end_to_end_p95_s": plan.end_to_end_p95_s,
        "latency_p95_interval_s": _interval(plan.latency_interval),
        "end_to_end_p95_interval_s": _interval(plan.end_to_end_interval),
        "user_latency_s": felt_json(plan.felt),
        "latency": {
            "objective": plan.objective.value,
            "percentile": plan.percentile,
            "seconds": plan.felt_s,
            "interval_s": _interval(plan.felt_interval),
        },
        "horizon": {
            "requests": plan.requests,
            "seconds": plan.seconds,
            "latencies": plan.seconds / plan.stay_s if plan.stay_s > 0 else None,
        },
        "cost": {"gpus": plan.gpus, "dollars_per_hour": plan.dollars_per_hour},
        "goal": plan.goal.value,
        "objective": plan.objective.value,
        "target": target,
        "workload_digest": digest,
        "cached_share": plan.cached_share,
        "budget": plan.budget.value,
        "feasible": True,
        "optimality": {
            "proved": solution.proof.value != "searched",
            "over": _over(plan),
            "proof": solution.proof.value,
            "gap": solution.gap,
            "gpu_step": plan.gpu_step,
        },
        "dispatch": plan.dispatch.value,
        "binds": plan.binds,
        "load": None
        if plan.load is None
        else {
            "offered_per_s": plan.load.offered_per_s,
            "sustained_per_s": plan.load.sustained_per_s,
            "overloaded": plan.load.overloaded,
        },
        "grading": _grading_json(site, plan.grading),
        "candidates": _choice_json(plan.choice),
        "rate_per_s": plan.rate_per_s,
        "breaks_at_rate": None if plan.load is None else plan.load.sustained_per_s,
        "evaluations": solution.evaluations,
        "simulations": plan.simulations,
        "seconds": seconds,
        "inputs": {name: getattr(inputs, name) for name in PlanInputs.__slots__},
    }


def _over(plan: CascadePlan) -> str:
    """What a proof is about."""
    searched = "routings at the judged scores, and the replica mixes that are searched"
    return searched if plan.choice is None else f"all {plan.choice.considered} cascades of the candidates, {searched}"


def _choice_json(choice: CascadeChoice | None) -> dict[str, Any] | None:
    """left_out: how many cascades have no plan, by why, see LeftOut. latency_p95_s: that the objective means, at its
    percentile."""
    if choice is None:
        return None
    other = choice.runner_up
    return {
        "tiers": list(choice.candidates),
        "min_tiers": choice.sizes[0],
        "max_tiers": choice.sizes[1],
        "cascades": choice.considered,
        "planned": choice.planned,
        "left_out": {why.value: choice.left_out.get(why, 0) for why in LeftOut},
        "runner_up": None
        if other is None
        else {
            "tiers": list(other.tiers),
            "quality": other.quality,
            "latency_p95_s": other.latency_s,
            "cost": {"gpus": other.gpus, "dollars_per_hour": other.dollars_per_hour},
            "rate_per_s": other.rate_per_s,
        },
    }


def _grading_json(site: Site, grading: GradingReport | None) -> dict[str, Any] | None:
    """by: the tier or the judge model. wait_s: from the end of an answer to its score."""
    if grading is None or site.grading is None:
        return None
    by = site.tiers[site.grading.tier] if site.grading.by_tier else site.grading.model
    wait = _spread(grading.wait)
    return {"by": by, "requests": grading.requests, "requests_per_s": grading.per_s, "wait_s": wait}


def felt_json(felt: Felt) -> dict[str, dict[str, float]]:
    """What users feel, in seconds."""
    return {
        "end_to_end": _spread(felt.end_to_end),
        "first_token": _spread(felt.first_token),
        "pace": _spread(felt.pace),
    }


def _spread(p: Percentiles) -> dict[str, float]:
    return {"p50": p.p50, "p95": p.p95, "p99": p.p99, "mean": p.mean}


def group_json(shape: ReplicaShape, count: int) -> dict[str, Any]:
    """Equal replicas. gpu: the type, in a cluster of several. ep, attn_dp: where they are more than 1."""
    more = {"gpu": shape.gpu} if shape.gpu else {}
    divided = {name: size for name, size in (("ep", shape.ep), ("attn_dp", shape.attn_dp)) if size > 1}
    return {"tp": shape.tp, "pp": shape.pp, **more, **divided, "count": count}


def _speculation_json(speculation: PlannedSpeculation | None) -> dict[str, Any] | None:
    """memory_gb: of all drafters in one replica. choices: the best chain and window by the replies of a batch."""
    if speculation is None:
        return None
    return {
        "max_window": speculation.max_window,
        "drafters": [
            {
                "model": model.name,
                "acceptance": model.acceptance,
                "weights_gb": model.weight_bytes / 1e9,
                "kv_bytes_per_token": model.kv_bytes_per_token,
            }
            for model in speculation.models
        ],
        "replicas": [
            {
                **{key: value for key, value in group_json(drafts.shape, 1).items() if key != "count"},
                "memory_gb": drafts.memory_bytes / 1e9,
                "choices": [
                    {"replies": choice.replies, "chain": list(choice.chain), "window": choice.window}
                    for choice in drafts.choices
                ],
            }
            for drafts in speculation.replicas
        ],
    }


def instances_of(tier: dict[str, Any]) -> int:
    """How many workers a tier of a plan file has: one for each replica, and one for a remote tier that is used."""
    return 1 if tier.get("remote") is not None else sum(int(group["count"]) for group in tier["replicas"])


def drafters_of(tier: dict[str, Any]) -> PlannedDrafters:
    """What drafts in a tier of a plan file. KeyError, TypeError or ValueError if it does not say so."""
    speculation = tier.get("speculation")
    if speculation is None:
        return PlannedDrafters()
    return PlannedDrafters(
        tuple(str(drafter["model"]) for drafter in speculation["drafters"]), int(speculation["max_window"])
    )


def shape_of(group: dict[str, Any]) -> ReplicaShape:
    """Of equal replicas in a plan file. KeyError, TypeError or ValueError if it does not say so."""
    ep, attn_dp = int(group.get("ep", 1)), int(group.get("attn_dp", 1))
    return ReplicaShape(int(group["tp"]), int(group["pp"]), str(group.get("gpu", "")), ep, attn_dp)


def _interval(interval: Interval | None) -> dict[str, float] | None:
    if interval is None:
        return None
    return {"mean": interval.mean, "low": interval.low, "high": interval.high, "runs": interval.runs}


def report_json(report: Report) -> dict[str, Any]:
    return {
        "requests": report.requests,
        "ttft_s": _spread(report.ttft),
        "tpot_s": _spread(report.tpot),
        "latency_s": _spread(report.latency),
        "requests_per_s": report.requests_per_s,
        "output_tokens_per_s": report.output_tokens_per_s,
        "utilisation": report.utilisation,
        "preemptions": report.preemptions,
    }


def read_plan(path: Path) -> ReadPlan:
    """FileError for anything that is not a plan of ours."""
    try:
        result = json.loads(path.read_text())
        return ReadPlan(
            PlanInputs(**result["inputs"]),
            tuple(SKIPPED if h is None else float(h) for h in result["thresholds"]),
            tuple(tuple((shape_of(r), int(r["count"])) for r in tier["replicas"]) for tier in result["tiers"]),
            Dispatch(result["dispatch"]),
            tuple(None if s is None else float(s) for s in result.get("skip_below", ())),
            tuple(map(drafters_of, result["tiers"])),
            ladder_of(result),
            tuple(str(tier["name"]) for tier in result["tiers"]),
            early_rules_of(result),
            long_answers_of(result),
            best_answer_of(result),
        )
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path}: not a plan file: {error!r}") from None


def long_answers_of(result: dict[str, Any]) -> tuple[LongAnswers | None, ...]:
    """The rules for long answers in a plan file, of the tiers but the last; empty without any.

    Raises:
        KeyError, TypeError, ValueError: They are not such rules; names the field.
    """
    rules = tuple(
        None if rule is None else LongAnswers(rule["from_tokens"], float(rule["threshold"]))
        for rule in result.get("long_answers") or ()
    )
    _check_tiers("long_answers", rules, result)
    for i, rule in enumerate(rules):
        if rule is None:
            continue
        if not isinstance(rule.from_tokens, int) or isinstance(rule.from_tokens, bool):
            raise ValueError(f"long_answers[{i}].from_tokens: must be a whole number, not {rule.from_tokens!r}")
        _check_fields(long_answers_problems(rule, f"long_answers[{i}]"))
    return rules


def best_answer_of(result: dict[str, Any]) -> bool:
    """Whether replies are the best of a request's answers by a plan file; those that do not say have the last.

    Raises:
        ValueError: It is neither true nor false; names the field.
    """
    best_answer = result.get("best_answer", False)
    if not isinstance(best_answer, bool):
        raise ValueError(f"best_answer: must be true or false, not {best_answer!r}")
    return best_answer


def _check_tiers(name: str, rules: Sequence[object], result: dict[str, Any]) -> None:
    """ValueError unless there are no rules, or one for each tier but the last."""
    if rules and len(rules) != len(result["tiers"]) - 1:
        raise ValueError(f"{name}: must be of {len(result['tiers']) - 1} tiers, not {len(rules)}")


def _check_fields(problems: Iterable[FieldProblem]) -> None:
    """ValueError naming every field with a problem."""
    if text := "; ".join(f"{problem.field}: {problem.problem}" for problem in problems):
        raise ValueError(text)


def early_rules_of(result: dict[str, Any]) -> tuple[EarlyRule, ...]:
    """The early checks in a plan file, of the tiers but the last; empty without any.

    Raises:
        KeyError, TypeError, ValueError: They are not such checks; names the field.
    """
    rules = tuple(
        EarlyRule(
            tuple(EarlyCheck(int(check["after_tokens"]), float(check["reject_below"])) for check in tier["checks"]),
            int(tier["meanwhile_tokens"]),
        )
        for tier in result.get("early_checks") or ()
    )
    _check_tiers("early_checks", rules, result)
    for i, rule in enumerate(rules):
        _check_fields(early_check_problems(rule.checks, f"early_checks[{i}].checks"))
        if rule.meanwhile_tokens < 0:
            raise ValueError(f"early_checks[{i}].meanwhile_tokens: must not be negative")
    return rules


def _early_json(outcome: EarlyOutcome) -> dict[str, Any]:
    """checks: as the mesh file has them. The others: see EarlyRule and EarlyOutcome."""
    return {
        "checks": [asdict(check) for check in outcome.rule.checks],
        "meanwhile_tokens": outcome.rule.meanwhile_tokens,
        "rejected": outcome.rejected,
        "error": outcome.error,
        "saved": outcome.saved,
        "scored": outcome.scored,
    }


def ladder_of(result: dict[str, Any]) -> BurstLadder | None:
    """The burst ladder in a plan file; None without one.

    Raises:
        KeyError, TypeError, ValueError: It is no ladder, or not one for the tiers of the plan; names the field.
    """
    ladder = ladder_from_json(result.get("burst"), SKIPPED)
    if ladder is None:
        return None
    instances = [sum(int(group["count"]) for group in tier["replicas"]) for tier in result["tiers"]]
    own = [threshold for threshold, _ in mesh_tiers(result["thresholds"], instances)]
    names = [str(tier["name"]) for tier in result["tiers"]]
    _check_fields(ladder_problems(mesh_ladder(ladder, instances), names, own, "burst"))
    return ladder


def read_figures(path: Path) -> dict[str, Any]:
    """All of a plan file, with what is needed to publish it; FileError for anything that is not a plan of ours."""
    read_plan(path)
    result: dict[str, Any] = json.loads(path.read_text())
    expected = ("objective", "quality", "latency_p95_s", "end_to_end_p95_s")
    missing = [name for name in expected if name not in result]
    for i, tier in enumerate(result["tiers"]):
        missing += [f"tiers[{i}].{name}" for name in ("name", "model", "gpus") if name not in tier]
    if missing:
        raise FileError(f"{path}: not a plan file: {', '.join(missing)} missing")
    return result


def read_planned_site(plan: ReadPlan) -> Site:
    """The site of a plan's own input files, with the drafters of the plan; of candidates, the tiers that were chosen.

    Raises:
        FileError: A file cannot be used.
        InvalidRequest: A chosen tier or a drafter of the plan is not in the models file any more.
    """
    site = read_site(Path(plan.inputs.cluster), Path(plan.inputs.models))
    if plan.inputs.max_tiers is not None:
        tiers = [site.tiers.index(name) for name in plan.tiers if name in site.tiers]
        if len(tiers) < len(plan.tiers) or tiers != sorted(set(tiers)):
            chosen, there = ", ".join(plan.tiers), ", ".join(site.tiers)
            raise invalid("tiers", f"the plan has {chosen}; the models file has {there}, not all of them in that order")
        site = site.only(tiers)
    return with_planned_drafters(site, plan.drafters)


def strategies_of(shapes: Sequence[Sequence[tuple[ReplicaShape, int]]], site: Site) -> tuple[Strategy, ...]:
    """Replicas (shape, count) of each tier, on a site. InvalidRequest where one does not fit."""
    result = []
    for tier, parts in enumerate(shapes):
        if (remote := site.remote_of(tier)) is not None:
            result.append(Strategy((), 0.0, remote))
            continue
        replicas = []
        for j, (shape, count) in enumerate(parts):
            replica, reason = site.replica(tier, shape, 1)
            if replica is None:
                raise invalid(f"tiers[{tier}].replicas[{j}]", reason)
            replicas.append((replica, count))
        result.append(Strategy(tuple(replicas), 0.0))
    return tuple(result)
