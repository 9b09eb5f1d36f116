"""The deployment that SimulateDeployment runs: replicas and thresholds of each tier, and its other routing rules."""

from penstock.proto.planner.v1 import planner_pb2 as pb
from planner_service.early_checks import EarlyRule
from planner_service.early_rules import meanwhile_tokens
from planner_service.planning_codec.inputs import LENGTHS_OF_ANSWERS
from planner_service.planning_codec.replicas import shape_from_proto
from planner_service.proto_codec import early_checks_from_proto, long_answers_from_proto
from planner_service.routing.quality import SKIPPED
from planner_service.routing.rules import RoutingRules
from planner_service.site import Demand, Site
from services.domain.early_checks import early_check_problems
from services.domain.errors import InvalidRequest, invalid
from services.domain.hardware import ReplicaShape
from services.domain.long_answers import LongAnswers, long_answers_problems


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
        replicas = [
            shape_from_proto(group, f"tiers[{i}].replicas[{j}]", group.gpu) for j, group in enumerate(tier.replicas)
        ]
        shapes.append(tuple((shape, group.count) for shape, group in zip(replicas, tier.replicas, strict=True)))
    return tuple(thresholds), tuple(shapes)


def rules_from_proto(request: pb.SimulateDeploymentRequest, site: Site, demand: Demand) -> RoutingRules:
    """What the routing has besides thresholds.

    Raises:
        InvalidRequest: A rule is out of bounds, is of the last tier, or lacks what it is about; names the field.
    """
    early = _early_rules_from_proto(request, site, demand)
    skip_below, long_answers = _skip_rule_from_proto(request), _long_answers_from_proto(request)
    return RoutingRules(skip_below, long_answers, early, request.best_answer)


def _skip_rule_from_proto(request: pb.SimulateDeploymentRequest) -> tuple[float | None, ...]:
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


def _early_rules_from_proto(request: pb.SimulateDeploymentRequest, site: Site, demand: Demand) -> tuple[EarlyRule, ...]:
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
