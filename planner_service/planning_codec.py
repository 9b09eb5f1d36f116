"""PlanCascade and SimulateDeployment: proto to what the planner computes with, and back. Fields are checked as in files."""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from pydantic import BaseModel, ValidationError

from penstock.proto.planner.v1 import planner_pb2 as pb
from planner_service.burst_codec import ladder_to_proto
from planner_service.cascade_plan import CascadeChoice, CascadePlan, Felt
from planner_service.demand import demand_of, workload_digest
from planner_service.early_checks import EarlyRule, PartScores
from planner_service.early_rules import EarlyOutcome, meanwhile_tokens
from planner_service.files import (
    CascadeFile,
    ClusterFile,
    DrafterEntry,
    EngineEntry,
    GpuEntry,
    ModelEntry,
    NodesEntry,
    RemoteEntry,
    SpeculationEntry,
    TierEntry,
)
from planner_service.planned_drafts import PlannedSpeculation, planned_speculation
from planner_service.planning_options import PERCENTILE, Budget, Goal, Options
from planner_service.proto_codec import (
    early_checks_from_proto,
    early_checks_to_proto,
    long_answers_from_proto,
    long_answers_to_proto,
)
from planner_service.routing.quality import SKIPPED, JudgedSample
from planner_service.routing.rules import RoutingRules
from planner_service.simulator import Dispatch, EngineLimits, Percentiles, Replica, Report, Workload
from planner_service.simulator.felt import Objective
from planner_service.simulator.remote import RemoteTier
from planner_service.simulator.workload import Floats
from planner_service.site import Demand, Site, TierSpeculation
from planner_service.step_times import step_times
from services.domain.early_checks import MAX_EARLY_CHECKS, early_check_problems
from services.domain.errors import FieldProblem, InvalidRequest, invalid
from services.domain.hardware import ClusterSpec, ReplicaShape
from services.domain.latency import StepLatencyModel
from services.domain.long_answers import LongAnswers, long_answers_problems
from services.proto_codec import duration

REQUESTS, SEED = 500, 1  # of `penstock plan`

LENGTHS_OF_ANSWERS = "must be those of the judged answers where long answers are accepted"
_Part = TypeVar("_Part", bound=BaseModel)
_Value = TypeVar("_Value")

_OBJECTIVES = {
    pb.OBJECTIVE_UNSPECIFIED: Objective.LARGEST_TIER,
    pb.OBJECTIVE_LARGEST_TIER: Objective.LARGEST_TIER,
    pb.OBJECTIVE_END_TO_END: Objective.END_TO_END,
    pb.OBJECTIVE_FIRST_TOKEN: Objective.FIRST_TOKEN,
    pb.OBJECTIVE_PACE: Objective.PACE,
}
_GOALS = {
    pb.GOAL_UNSPECIFIED: None,
    pb.GOAL_LATENCY: Goal.LATENCY,
    pb.GOAL_QUALITY: Goal.QUALITY,
    pb.GOAL_COST: Goal.COST,
    pb.GOAL_RATE: Goal.RATE,
}
_BUDGETS = {
    pb.GPU_BUDGET_UNSPECIFIED: Budget.AT_MOST,
    pb.GPU_BUDGET_AT_MOST: Budget.AT_MOST,
    pb.GPU_BUDGET_EXACT: Budget.EXACT,
}
_DISPATCH = {
    pb.DISPATCH_UNSPECIFIED: Dispatch.CAPACITY,
    pb.DISPATCH_CAPACITY: Dispatch.CAPACITY,
    pb.DISPATCH_ROUND_ROBIN: Dispatch.ROUND_ROBIN,
    pb.DISPATCH_PENDING_WORK: Dispatch.PENDING_WORK,
}
_LENGTHS = {
    pb.LENGTH_SOURCE_UNSPECIFIED: "quality",
    pb.LENGTH_SOURCE_JUDGED: "quality",
    pb.LENGTH_SOURCE_TRACE: "trace",
}


def options_from_proto(request: pb.PlanCascadeRequest) -> Options:
    """InvalidRequest naming every unsound field; see Options.check for what does not go together."""
    problems = []
    if request.HasField("confidence") and not 0 < request.confidence < 1:
        problems.append(FieldProblem("confidence", f"must be over 0 and under 1, not {request.confidence:g}"))
    if request.HasField("gpus") and request.gpus < 1:
        problems.append(FieldProblem("gpus", "must be at least 1"))
    if request.skip and not any(prompt.predicted_scores for prompt in request.inputs.workload.judged):
        problems.append(FieldProblem("inputs.workload.judged", "have no predicted_scores, which skip needs"))
    if request.long_answers and request.inputs.workload.lengths == pb.LENGTH_SOURCE_TRACE:
        problems.append(FieldProblem("inputs.workload.lengths", LENGTHS_OF_ANSWERS))
    if request.HasField("early_error") and not request.inputs.workload.early_after_tokens:
        problems.append(FieldProblem("inputs.workload.early_after_tokens", "are needed for early_error"))
    if problems:
        raise InvalidRequest(*problems)
    return Options(
        gpus=request.gpus if request.HasField("gpus") else None,
        min_quality=request.min_quality if request.HasField("min_quality") else None,
        max_latency_s=request.max_latency_s if request.HasField("max_latency_s") else None,
        goal=_known(_GOALS, request.goal, "goal"),
        objective=_known(_OBJECTIVES, request.objective, "objective"),
        confidence=request.confidence if request.HasField("confidence") else None,
        seed=seed_of(request.inputs.workload),
        dispatch=dispatch_from_proto(request.dispatch),
        budget=_known(_BUDGETS, request.budget, "budget"),
        max_utilisation=request.max_utilisation if request.HasField("max_utilisation") else None,
        skip=request.skip,
        long_answers=request.long_answers,
        burst_floor=request.burst_floor if request.HasField("burst_floor") else None,
        burst_mean=request.burst_mean if request.HasField("burst_mean") else None,
        max_tiers=request.max_tiers if request.HasField("max_tiers") else None,
        min_tiers=request.min_tiers if request.HasField("min_tiers") else None,
        early_error=request.early_error if request.HasField("early_error") else None,
        percentile=request.percentile if request.HasField("percentile") else PERCENTILE,
    )


def dispatch_from_proto(dispatch: pb.Dispatch.ValueType) -> Dispatch:
    return _known(_DISPATCH, dispatch, "dispatch")


def seed_of(workload: pb.Workload) -> int:
    return workload.seed if workload.HasField("seed") else SEED


def inputs_from_proto(inputs: pb.PlanningInputs) -> tuple[Site, Demand]:
    """InvalidRequest naming the field, as `inputs.cascade.tiers[0].model_name`."""
    site = site_from_proto(inputs.cluster, inputs.cascade)
    return site, demand_from_proto(inputs.workload, site.tiers)


def site_from_proto(cluster: pb.Cluster, cascade: pb.Cascade) -> Site:
    where = _cluster_types(cluster)
    at = "inputs.cascade"
    entries, measured = [], []
    for i, tier in enumerate(cascade.tiers):
        here = f"{at}.tiers[{i}]"
        if tier.HasField("model_spec"):
            model: str | ModelEntry = _checked(ModelEntry, _fields(tier.model_spec), f"{here}.model_spec")
        elif tier.HasField("model_name"):
            model = tier.model_name
        else:
            raise invalid(f"{here}.model", "give either model_name or model_spec")
        speculation = _speculation(tier, here)
        entries.append(
            _checked(
                TierEntry, {"name": tier.name, "model": model, "speculation": speculation, **_remote(tier, here)}, here
            )
        )
        measured.append(tuple(replica_from_proto(m, f"{here}.measured[{j}]") for j, m in enumerate(tier.measured)))
    message = _fields(cascade) | {"tiers": entries}
    cascade_file = _checked(CascadeFile, message, at)
    specs = tuple(_spec(tier, f"{at}.tiers[{i}].model_name") for i, tier in enumerate(cascade_file.tiers))
    names = tuple(tier.name for tier in cascade_file.tiers)
    if len(where) > 1 and any(measured):
        first = next(i for i, replicas in enumerate(measured) if replicas)
        raise invalid(
            f"{at}.tiers[{first}].measured", "step times are measured on one type of GPU, the cluster has several"
        )
    limits = _limits(cascade_file.engine)
    return Site(
        where[0],
        names,
        specs,
        cascade_file.runtime.spec(),
        limits,
        cascade_file.judge_s,
        tuple(measured),
        where[1:],
        _speculations(cascade_file, at),
        cascade_file.grading(),
        _remotes(cascade_file, where, at),
    )


def _remote(tier: pb.CascadeTier, at: str) -> dict[str, RemoteEntry]:
    """The API that serves a tier, as a field of TierEntry; nothing where none does."""
    if not tier.HasField("remote"):
        return {}
    if tier.measured:
        raise invalid(f"{at}.remote", "not with measured replicas")
    return {"remote": _checked(RemoteEntry, _fields(tier.remote), f"{at}.remote")}


def _speculation(tier: pb.CascadeTier, at: str) -> SpeculationEntry:
    """What drafts for a tier, checked but for names of the catalogue."""
    if tier.measured and tier.speculation.drafters:
        raise invalid(f"{at}.speculation", "not with measured replicas, which are measured with what drafts")
    drafters = []
    for j, drafter in enumerate(tier.speculation.drafters):
        here = f"{at}.speculation.drafters[{j}]"
        fields = _fields(drafter, "model_name", "model_spec")
        if drafter.HasField("model_spec"):
            fields["model"] = _checked(ModelEntry, _fields(drafter.model_spec), f"{here}.model_spec")
        elif drafter.HasField("model_name"):
            fields["model"] = drafter.model_name
        else:
            raise invalid(f"{here}.model", "give either model_name or model_spec")
        drafters.append(_checked(DrafterEntry, fields, here))
    fields = _fields(tier.speculation, "drafters")
    return _checked(SpeculationEntry, fields | {"drafters": drafters}, f"{at}.speculation")


def _remotes(cascade: CascadeFile, types: tuple[ClusterSpec, ...], at: str) -> tuple[RemoteTier | None, ...]:
    """The APIs that serve tiers. InvalidRequest where the cluster has no prices."""
    try:
        return cascade.remotes(types)
    except ValueError as error:
        first = next(i for i, tier in enumerate(cascade.tiers) if tier.remote is not None)
        raise invalid(f"{at}.tiers[{first}].remote", str(error).removeprefix("remote: ")) from None


def _speculations(cascade: CascadeFile, at: str) -> tuple[TierSpeculation, ...]:
    """What drafts, by tier. InvalidRequest for a model that the catalogue does not have."""
    for i, tier in enumerate(cascade.tiers):
        for j, drafter in enumerate(tier.speculation.drafters):
            _spec(drafter, f"{at}.tiers[{i}].speculation.drafters[{j}].model_name")
    return cascade.speculations()


def _cluster_types(cluster: pb.Cluster) -> tuple[ClusterSpec, ...]:
    at = "inputs.cluster"
    if not cluster.types:
        return (_spec(_checked(NodesEntry, _nodes(cluster, at), at), f"{at}.gpu_name"),)
    if others := sorted(_fields(cluster, "types")):
        raise invalid(f"{at}.{others[0]}", "give either types or the fields of one type")
    message = {"types": [_nodes(kind, f"{at}.types[{i}]") for i, kind in enumerate(cluster.types)]}
    cluster_file = _checked(ClusterFile, message, at)
    for i, entry in enumerate(cluster_file.types):
        _spec(entry, f"{at}.types[{i}].gpu_name")
    return cluster_file.specs()


def _nodes(nodes: pb.Cluster | pb.GpuType, at: str) -> dict[str, Any]:
    """What NodesEntry reads."""
    message = _fields(nodes, "gpu_name", "gpu_spec")
    if nodes.HasField("gpu_spec"):
        message["gpu"] = _checked(GpuEntry, _fields(nodes.gpu_spec), f"{at}.gpu_spec")
    elif nodes.HasField("gpu_name"):
        message["gpu"] = nodes.gpu_name
    else:
        raise invalid(f"{at}.gpu", "give either gpu_name or gpu_spec")
    return message


def demand_from_proto(workload: pb.Workload, tiers: tuple[str, ...]) -> Demand:
    at = "inputs.workload"
    if workload.HasField("requests") and workload.requests < 1:
        raise invalid(f"{at}.requests", "must be at least 1")
    rate = workload.rate if workload.HasField("rate") else None
    if rate is not None and not (np.isfinite(rate) and rate > 0):
        raise invalid(f"{at}.rate", f"must be over 0, not {rate:g}")
    trace, judged = trace_from_proto(workload.trace, f"{at}.trace"), _judged(workload, tiers, f"{at}.judged")
    try:
        return demand_of(
            trace,
            judged,
            requests=workload.requests if workload.HasField("requests") else min(REQUESTS, len(trace)),
            seed=seed_of(workload),
            lengths=_known(_LENGTHS, workload.lengths, f"{at}.lengths"),
            rate=rate,
        )
    except InvalidRequest as error:
        raise _under(at, error) from None


def plan_to_proto(plan: CascadePlan, site: Site, demand: Demand, took_s: float) -> pb.CascadePlan:
    """site: that the plan is for; it says what drafts."""
    limits = (*plan.skip_below, None) if plan.skip_below else (None,) * len(plan.tiers)
    early = (*plan.early, None) if plan.early else (None,) * len(plan.tiers)
    long_answers = (*plan.long_answers, None) if plan.long_answers else (None,) * len(plan.tiers)
    created = pb.CascadePlan(
        tiers=[
            pb.PlannedTier(
                name=tier.name,
                model=tier.model,
                gpus=tier.gpus,
                replicas=[
                    pb.ReplicaGroup(**dataclasses.asdict(replica.shape), count=count)
                    for replica, count in tier.strategy.replicas
                ],
                threshold=threshold if threshold is not None and threshold <= 100 else None,
                used=tier.strategy.used,
                share_processed=tier.share_processed,
                share_answered=tier.share_answered,
                latency_p95_s=tier.p95_s,
                report=report_to_proto(tier.report),
                utilisation=utilisation,
                speculation=_speculation_to_proto(planned_speculation(site, i, tier.strategy.replicas)),
                skip_below=limit,
                remote_dollars_per_hour=None if tier.strategy.remote is None else tier.strategy.remote_dollars_per_hour,
                early=None if outcome is None else _early_to_proto(outcome),
                step_times=step_times(site, i, ()).source,
                long_answers=long_answers_to_proto(long),
            )
            for i, (tier, threshold, utilisation, limit, outcome, long) in enumerate(
                zip(plan.tiers, (*plan.thresholds, None), plan.utilisation, limits, early, long_answers, strict=True)
            )
        ],
        quality=plan.quality,
        latency_p95_s=plan.latency_p95_s,
        end_to_end_p95_s=plan.end_to_end_p95_s,
        proof=plan.solution.proof.value,
        gap=plan.solution.gap,
        binds=plan.binds,
        evaluations=plan.solution.evaluations,
        simulations=plan.simulations,
        took=duration(took_s),
        workload_digest=workload_digest(demand),
        gpu_step=plan.gpu_step,
        rate_per_s=plan.rate_per_s,
        dollars_per_hour=plan.dollars_per_hour,
        dispatch=pb.DISPATCH_CAPACITY if plan.dispatch is Dispatch.CAPACITY else pb.DISPATCH_ROUND_ROBIN,
        burst=None if plan.burst is None else ladder_to_proto(plan.burst),
        burst_reason=plan.burst_reason,
        early_reason=plan.early_reason,
        choice=None if plan.choice is None else _choice_to_proto(plan.choice),
        objective=next(value for value, objective in _OBJECTIVES.items() if value and objective is plan.objective),
        percentile=plan.percentile,
        latency_s=plan.felt_s,
        user_latency=user_latency_to_proto(plan.felt),
    )
    created.goal = next(value for value, goal in _GOALS.items() if goal is plan.goal)
    if plan.load is not None:
        created.breaks_at_rate_per_s = plan.load.sustained_per_s
    if plan.grading is not None:
        created.grading.CopyFrom(
            pb.Grading(
                requests=plan.grading.requests,
                requests_per_s=plan.grading.per_s,
                wait=percentiles_to_proto(plan.grading.wait),
            )
        )
    if plan.promise is not None:
        created.tested_quality = plan.promise.tested_quality
    return created


def _early_to_proto(outcome: EarlyOutcome) -> pb.PlannedEarlyChecks | None:
    if not outcome.rule.checks:
        return None
    return pb.PlannedEarlyChecks(
        checks=early_checks_to_proto(outcome.rule.checks),
        meanwhile_tokens=outcome.rule.meanwhile_tokens,
        rejected_share=outcome.rejected,
        error=outcome.error,
        saved_share=outcome.saved,
        scored_per_answer=outcome.scored,
    )


def _choice_to_proto(choice: CascadeChoice) -> pb.CascadeChoice:
    other = choice.runner_up
    return pb.CascadeChoice(
        candidates=choice.candidates,
        considered_count=choice.considered,
        planned_count=choice.planned,
        left_out=[pb.LeftOutCascades(reason=why.value, count=count) for why, count in choice.left_out.items()],
        runner_up=None
        if other is None
        else pb.RunnerUp(
            tiers=other.tiers,
            quality=other.quality,
            latency_p95_s=other.latency_s,
            gpus=other.gpus,
            dollars_per_hour=other.dollars_per_hour,
            rate_per_s=other.rate_per_s,
        ),
    )


def _speculation_to_proto(speculation: PlannedSpeculation | None) -> pb.PlannedSpeculation | None:
    if speculation is None:
        return None
    return pb.PlannedSpeculation(
        drafters=[
            pb.PlannedDrafter(
                model=model.name,
                acceptance=model.acceptance,
                weight_bytes=model.weight_bytes,
                kv_bytes_per_token=model.kv_bytes_per_token,
            )
            for model in speculation.models
        ],
        max_window=speculation.max_window,
        replicas=[
            pb.ReplicaDrafts(
                tp=drafts.shape.tp,
                pp=drafts.shape.pp,
                gpu=drafts.shape.gpu,
                memory_bytes=drafts.memory_bytes,
                choices=[
                    pb.DraftChoice(replies=choice.replies, chain=choice.chain, window=choice.window)
                    for choice in drafts.choices
                ],
            )
            for drafts in speculation.replicas
        ],
    )


def shapes_from_proto(
    request: pb.SimulateDeploymentRequest, tiers: int
) -> tuple[tuple[float, ...], tuple[tuple[tuple[ReplicaShape, int], ...], ...]]:
    """(thresholds, replicas of each tier as (shape, count)). InvalidRequest naming the field."""
    if len(request.tiers) != tiers:
        raise invalid("tiers", f"the cascade has {tiers}, not {len(request.tiers)}")
    thresholds, shapes = [], []
    for i, tier in enumerate(request.tiers):
        last = i == tiers - 1
        if last and tier.HasField("threshold"):
            raise invalid(f"tiers[{i}].threshold", "the last tier's answers always stand: it has no threshold")
        if tier.HasField("threshold") and not 0 <= tier.threshold <= 100:
            raise invalid(f"tiers[{i}].threshold", f"must be from 0 to 100, not {tier.threshold:g}")
        if not last:
            thresholds.append(tier.threshold if tier.HasField("threshold") else SKIPPED)
        for j, group in enumerate(tier.replicas):
            if group.count < 1:
                raise invalid(f"tiers[{i}].replicas[{j}].count", "must be at least 1")
        replicas = [_shape(group, f"tiers[{i}].replicas[{j}]", group.gpu) for j, group in enumerate(tier.replicas)]
        shapes.append(tuple((shape, group.count) for shape, group in zip(replicas, tier.replicas, strict=True)))
    return tuple(thresholds), tuple(shapes)


def _shape(message: pb.ReplicaGroup | pb.MeasuredReplica, at: str, gpu: str = "") -> ReplicaShape:
    """InvalidRequest names the size that is not positive."""
    sizes = {"tp": message.tp, "pp": message.pp}
    sizes["ep"] = message.ep if message.HasField("ep") else 1
    sizes["attn_dp"] = message.attn_dp if message.HasField("attn_dp") else 1
    for name, size in sizes.items():
        if size < 1:
            raise invalid(f"{at}.{name}", "must be at least 1")
    return ReplicaShape(**sizes, gpu=gpu)


def skip_rule_from_proto(request: pb.SimulateDeploymentRequest) -> tuple[float | None, ...]:
    """skip_below of the tiers but the last.

    Raises:
        InvalidRequest: One is out of bounds, one is of the last tier, or there are no predicted scores; names the field.
    """
    limits = [tier.skip_below if tier.HasField("skip_below") else None for tier in request.tiers]
    for i, limit in enumerate(limits):
        if limit is None:
            continue
        if i == len(limits) - 1:
            raise invalid(f"tiers[{i}].skip_below", "the last tier is never passed over")
        if not 0 <= limit <= 100:
            raise invalid(f"tiers[{i}].skip_below", f"must be from 0 to 100, not {limit:g}")
        if not any(prompt.predicted_scores for prompt in request.inputs.workload.judged):
            raise invalid("inputs.workload.judged", "have no predicted_scores, which skip_below needs")
    return tuple(limits[:-1])


def rules_from_proto(request: pb.SimulateDeploymentRequest, site: Site, demand: Demand) -> RoutingRules:
    """What the routing has besides thresholds.

    Raises:
        InvalidRequest: A rule is out of bounds, is of the last tier, or lacks what it is about; names the field.
    """
    early = early_rules_from_proto(request, site, demand)
    return RoutingRules(skip_rule_from_proto(request), _long_answers_from_proto(request), early)


def _long_answers_from_proto(request: pb.SimulateDeploymentRequest) -> tuple[LongAnswers | None, ...]:
    rules = [long_answers_from_proto(t.long_answers) if t.HasField("long_answers") else None for t in request.tiers]
    for i, rule in enumerate(rules):
        if rule is None:
            continue
        if i == len(rules) - 1:
            raise invalid(f"tiers[{i}].long_answers", "the last tier's answers always stand")
        if request.inputs.workload.lengths == pb.LENGTH_SOURCE_TRACE:
            raise invalid("inputs.workload.lengths", LENGTHS_OF_ANSWERS)
        if problems := [*long_answers_problems(rule, f"tiers[{i}].long_answers")]:
            raise InvalidRequest(*problems)
    return tuple(rules[:-1])


def early_rules_from_proto(request: pb.SimulateDeploymentRequest, site: Site, demand: Demand) -> tuple[EarlyRule, ...]:
    """The early checks of the tiers but the last. Empty where no tier has any.

    Raises:
        InvalidRequest: They are no such checks, are of the last tier, or there are no scores for them; names the field.
    """
    sample, rules = demand.judged, []
    for i, tier in enumerate(request.tiers):
        checks = early_checks_from_proto(tier.early_checks)
        if checks and sample.parts is not None and demand.requests.parts is None:
            raise invalid("inputs.workload.lengths", "answers with the lengths of the trace have no early_checks")
        if checks and i == len(request.tiers) - 1:
            raise invalid(f"tiers[{i}].early_checks", "the last tier's answers always stand: it has none")
        if problems := [*early_check_problems(checks, f"tiers[{i}].early_checks")]:
            raise InvalidRequest(*problems)
        known = sample.parts.after_tokens if sample.parts is not None else ()
        for j, check in enumerate(checks):
            if check.after_tokens not in known:
                raise invalid(
                    f"tiers[{i}].early_checks[{j}].after_tokens",
                    f"{check.after_tokens} is none of inputs.workload.early_after_tokens",
                )
        rules.append(EarlyRule(checks, meanwhile_tokens(site, i, sample) if checks else 0))
    return tuple(rules[:-1]) if any(rule.checks for rule in rules) else ()


def report_to_proto(report: Report) -> pb.TierReport:
    return pb.TierReport(
        requests=report.requests,
        time_to_first_token=percentiles_to_proto(report.ttft),
        time_per_output_token=percentiles_to_proto(report.tpot),
        latency=percentiles_to_proto(report.latency),
        requests_per_s=report.requests_per_s,
        output_tokens_per_s=report.output_tokens_per_s,
        utilisation=report.utilisation,
        preemptions=report.preemptions,
    )


def percentiles_to_proto(p: Percentiles) -> pb.Percentiles:
    return pb.Percentiles(p50=p.p50, p95=p.p95, p99=p.p99, mean=p.mean)


def user_latency_to_proto(felt: Felt) -> pb.UserLatency:
    return pb.UserLatency(
        end_to_end=percentiles_to_proto(felt.end_to_end),
        first_token=percentiles_to_proto(felt.first_token),
        pace=percentiles_to_proto(felt.pace),
    )


def trace_from_proto(trace: pb.Trace, at: str) -> Workload:
    columns = {"input_tokens": trace.input_tokens, "output_tokens": trace.output_tokens}
    arrival_s = np.array(trace.arrival_s, float)
    if not len(arrival_s):
        raise invalid(f"{at}.arrival_s", "no requests")
    if not np.isfinite(arrival_s).all():
        raise invalid(f"{at}.arrival_s", "must be finite")
    arrays = []
    for name, column in columns.items():
        values = np.array(column, np.int64)
        if len(values) != len(arrival_s):
            raise invalid(f"{at}.{name}", f"{len(arrival_s)} requests arrive, {len(values)} have it")
        if values.min() < 1:
            raise invalid(f"{at}.{name}[{int(values.argmin())}]", "must be at least 1")
        arrays.append(values)
    order = np.argsort(arrival_s, kind="stable")
    return Workload(arrival_s[order], arrays[0][order], arrays[1][order])


def _judged(workload: pb.Workload, tiers: tuple[str, ...], at: str) -> JudgedSample:
    if not workload.judged:
        raise invalid(at, "no prompts")
    for i, prompt in enumerate(workload.judged):
        for name, values in (("output_tokens", prompt.output_tokens), ("judge_scores", prompt.judge_scores)):
            if len(values) != len(tiers):
                raise invalid(f"{at}[{i}].{name}", f"the cascade has {len(tiers)} tiers, not {len(values)}")
        if not all(0 <= score <= 100 for score in prompt.judge_scores):
            raise invalid(f"{at}[{i}].judge_scores", "must be from 0 to 100")
    parts = _unfinished(workload, len(tiers), at)
    refused = _of_all_or_none([p.refused for p in workload.judged], len(tiers), at, "refused")
    # an empty prompt or answer counts as one token, as in files
    return JudgedSample(
        tiers,
        np.maximum(1, np.array([p.input_tokens for p in workload.judged], np.int64)),
        np.maximum(1, np.array([p.output_tokens for p in workload.judged], np.int64)),
        np.array([p.judge_scores for p in workload.judged], float),
        _of_all_or_none([p.predicted_scores for p in workload.judged], len(tiers), at, "predicted_scores"),
        parts=parts,
        known_quality=_of_all_or_none([p.qualities for p in workload.judged], len(tiers), at, "qualities"),
        refused=None if refused is None else refused > 0,
    )


def _of_all_or_none(rows: Sequence[Sequence[float]], tiers: int, at: str, name: str) -> Floats | None:
    """(N, C) values from 0 to 100 that all prompts have, or None if none has; InvalidRequest naming the field."""
    for i, row in enumerate(rows):
        if len(row) not in (0, tiers):
            raise invalid(f"{at}[{i}].{name}", f"the cascade has {tiers} tiers, not {len(row)}")
        if bool(row) != bool(rows[0]):
            raise invalid(f"{at}[{i}].{name}", "all prompts must have them or none")
        if not all(0 <= value <= 100 for value in row):
            raise invalid(f"{at}[{i}].{name}", "must be from 0 to 100")
    return np.array(rows, float) if rows[0] else None


def _unfinished(workload: pb.Workload, tiers: int, at: str) -> PartScores | None:
    """The scores of unfinished answers; None without any. InvalidRequest naming the field."""
    after = tuple(workload.early_after_tokens)
    if len(after) > MAX_EARLY_CHECKS or (after and after[0] < 1) or any(a >= b for a, b in pairwise(after)):
        raise invalid(
            "inputs.workload.early_after_tokens",
            f"must be {MAX_EARLY_CHECKS} numbers of tokens at most, from 1 on, ascending",
        )
    scores = np.full((len(workload.judged), tiers, len(after)), np.nan)
    for i, prompt in enumerate(workload.judged):
        if len(prompt.unfinished) != (tiers if after else 0):
            needed = f"the cascade has {tiers} tiers" if after else "the workload has no early_after_tokens"
            raise invalid(f"{at}[{i}].unfinished", f"{needed}, not {len(prompt.unfinished)}")
        for tier, part in enumerate(prompt.unfinished):
            here = f"{at}[{i}].unfinished[{tier}].scores"
            if len(part.scores) > len(after):
                raise invalid(here, f"there are {len(after)} early_after_tokens, not {len(part.scores)}")
            if not all(0 <= score <= 100 for score in part.scores):
                raise invalid(here, "must be from 0 to 100")
            if part.scores and after[len(part.scores) - 1] >= max(1, prompt.output_tokens[tier]):
                whole = prompt.output_tokens[tier]
                raise invalid(
                    here, f"there is one after {after[len(part.scores) - 1]} tokens of an answer that has {whole}"
                )
            scores[i, tier, : len(part.scores)] = part.scores
    return PartScores(after, scores) if after else None


def trace_to_proto(work: Workload) -> pb.Trace:
    return pb.Trace(
        arrival_s=work.arrival_s.tolist(),
        input_tokens=work.input_tokens.tolist(),
        output_tokens=work.output_tokens.tolist(),
    )


def replica_to_proto(replica: Replica) -> pb.MeasuredReplica:
    latency, limits = replica.latency, replica.limits
    return pb.MeasuredReplica(
        tp=replica.shape.tp,
        pp=replica.shape.pp,
        ep=replica.shape.ep,
        attn_dp=replica.shape.attn_dp,
        kv_tokens=replica.kv_tokens,
        engine=pb.EngineBatch(**dataclasses.asdict(limits)),
        knot_tokens=latency.knot_tokens,
        knot_s=latency.knot_s,
        context_token_s=latency.context_token_s,
        pair_s=latency.pair_s,
        gap_s=latency.gap_s,
    )


def replica_from_proto(m: pb.MeasuredReplica, at: str) -> Replica:
    shape = _shape(m, at)
    if m.kv_tokens < 1:
        raise invalid(f"{at}.kv_tokens", "must be at least 1")
    if not np.isfinite([*m.knot_tokens, *m.knot_s, m.context_token_s, m.pair_s, m.gap_s]).all():
        raise invalid(at, "step times must be finite")
    try:
        latency = StepLatencyModel(tuple(m.knot_tokens), tuple(m.knot_s), m.context_token_s, m.pair_s, m.gap_s)
    except InvalidRequest as error:
        raise _under(at, error) from None
    limits = _limits(_checked(EngineEntry, _fields(m.engine), f"{at}.engine"))
    return Replica(shape, latency, m.kv_tokens, limits)


def _limits(engine: EngineEntry) -> EngineLimits:
    return EngineLimits(engine.max_running, engine.max_step_tokens, engine.block_tokens)


def _fields(message: Message, *without: str) -> dict[str, Any]:
    """The fields that a message sets."""
    fields = MessageToDict(message, preserving_proto_field_name=True)
    return {name: value for name, value in fields.items() if name not in without}


def _under(at: str, error: InvalidRequest) -> InvalidRequest:
    """The same problems, their fields named from `at` on."""
    return InvalidRequest(
        *(FieldProblem(f"{at}.{p.field.removeprefix('latency.')}", p.problem) for p in error.problems)
    )


def _checked(kind: type[_Part], fields: Mapping[str, Any], at: str) -> _Part:
    """`told` as one part of a file; InvalidRequest with every fault under its path."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequest(*(FieldProblem(_path(at, e["loc"]), e["msg"]) for e in error.errors())) from None


def _path(at: str, place: tuple[int | str, ...]) -> str:
    return at + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)


def _spec(part: Any, at: str) -> Any:
    """What a part stands for; a name that the catalogue does not have is a fault of `at`."""
    try:
        return part.spec()
    except ValueError as error:
        raise invalid(at, str(error)) from None


def _known(table: Mapping[Any, _Value], value: int, field: str) -> _Value:
    if value not in table:
        raise invalid(field, f"unknown value {value}")
    return table[value]
