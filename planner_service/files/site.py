"""The site of a question, checked: what fields of cluster and cascade mean together."""

import math
import re
from collections.abc import Iterator, Sequence

from penstock.planner_service.files.hardware import engine_spec, gpu_spec, model_spec
from penstock.planner_service.files.measured import replica_of
from penstock.planner_service.question.site import Site, TierSpeculation
from penstock.planner_service.routing.grading import QUESTION_TOKENS, REPLY_TOKENS, Grading
from penstock.planner_service.simulator import EngineLimits, Replica
from penstock.planner_service.simulator.remote import RemoteTier
from penstock.services.domain.errors import check, invalid
from penstock.services.domain.hardware import ClusterSpec, ModelSpec, Runtime
from penstock.services.domain.latency import StepLatencyModel
from penstock.services.mesh_schema.judge import MeshJudge
from penstock.types.planning import Cascade, CascadeJudge, CascadeTier, Cluster, MeasuredReplica, RemoteApi
from penstock.types.problems import FieldProblem
from penstock.types.ranges import range_problems

MAX_DRAFTERS = 4  # of one tier: every subset of them is a chain to compare
MAX_NAME = 40  # of a type of GPU
NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
OF_JUDGE_MODELS = ("replicas", "pass_s", "token_s", "max_batch", "max_batch_tokens")
OF_REMOTE_TIERS = ("dollars_per_million_input_tokens", "dollars_per_million_output_tokens", "first_token_s", "token_s")
OF_GRADING_TIERS = ("question_tokens", "reply_tokens")


def site_of(cluster: Cluster, cascade: Cascade) -> Site:
    """Where the cascade is to run.

    Raises:
        InvalidRequest: Fields are out of range or do not go together; named as in a question, `models.tiers[0].model`.
    """
    check(range_problems(cluster, "cluster"), range_problems(cascade, "models"))
    types = cluster_types(cluster)
    check(FieldProblem(*problem) for problem in _cascade_problems(cascade, types))
    tiers = cascade.tiers
    runtime = Runtime(
        cascade.runtime.step_overhead_ms / 1e3,
        cascade.runtime.memory_share,
        cascade.runtime.activation_gb * 1e9,
        engine=engine_spec(cascade.runtime.engine, "models.runtime.engine"),
    )
    speculation = tuple(_speculation(tier, f"models.tiers[{i}].speculation") for i, tier in enumerate(tiers))
    remotes = tuple(None if tier.remote is None else _remote(tier.remote) for tier in tiers)
    return Site(
        types[0],
        tuple(tier.name for tier in tiers),
        tuple(_model(tier, f"models.tiers[{i}].model") for i, tier in enumerate(tiers)),
        runtime,
        cascade.engine,
        cascade.judge_s,
        tuple(_measured(tier.measured, types, f"models.tiers[{i}].measured") for i, tier in enumerate(tiers)),
        types[1:],
        speculation if any(one.drafters for one in speculation) else (),
        None if cascade.judge is None else _grading(cascade.judge, [tier.name for tier in tiers]),
        remotes if any(one is not None for one in remotes) else (),
        draft_acceptance=tuple(tier.draft_acceptance for tier in tiers),
    )


def cluster_types(cluster: Cluster) -> tuple[ClusterSpec, ...]:
    """The GPUs by type; one type alone has no name. InvalidRequest names the field at fault."""
    types, at, specs = cluster.types, "cluster.types", list[ClusterSpec]()
    if not types:
        raise invalid(at, "missing: at least one type of GPU is needed")
    names = [one.name or one.gpu.name for one in types]
    for i, (one, name) in enumerate(zip(types, names, strict=True)):
        if one.name and not (len(one.name) <= MAX_NAME and NAME.fullmatch(one.name)):
            raise invalid(f"{at}[{i}].name", f"must be 1 to {MAX_NAME} characters of a-z, 0-9, - and .")
        if len(types) > 1 and not name:
            raise invalid(f"{at}[{i}].name", "is needed for a GPU that has no name")
        if names.index(name) < i:
            raise invalid(f"{at}[{i}].name", f"'{name}' is the name of types[{names.index(name)}]")
        if (one.dollars_per_gpu_hour is None) != (types[0].dollars_per_gpu_hour is None):
            raise invalid(f"{at}[{i}].dollars_per_gpu_hour", "give it for all types or for none")
        gpu = gpu_spec(one.gpu, f"{at}[{i}].gpu")
        link = one.node_link_gb_per_s * 1e9
        called = name if len(types) > 1 else ""
        specs.append(ClusterSpec(gpu, one.nodes, one.gpus_per_node, link, one.dollars_per_gpu_hour, called))
    return tuple(specs)


def _cascade_problems(cascade: Cascade, types: Sequence[ClusterSpec]) -> Iterator[tuple[str, str]]:
    names = [tier.name for tier in cascade.tiers]
    if not names:
        yield "models.tiers", "missing: at least one tier is needed"
    for i, tier in enumerate(cascade.tiers):
        at = f"models.tiers[{i}]"
        if not tier.name:
            yield f"{at}.name", "missing"
        elif names.index(tier.name) < i:
            yield f"{at}.name", f"'{tier.name[:80]}' is the name of tiers[{names.index(tier.name)}]: names are distinct"
        yield from _tier_problems(tier, types, at)
    if cascade.judge is not None:
        yield from _judge_problems(cascade.judge, names)


def _tier_problems(tier: CascadeTier, types: Sequence[ClusterSpec], at: str) -> Iterator[tuple[str, str]]:
    drafters = tier.speculation.drafters
    if tier.measured and drafters:
        yield f"{at}.speculation", "not with profiles, which are measured with what drafts"
    if tier.remote is not None:
        if tier.measured or drafters:
            yield f"{at}.remote", "not with profiles or speculation"
        if tier.draft_acceptance:
            yield f"{at}.draft_acceptance", "not with remote: APIs take no drafts"
        if tier.model.layers or not tier.model.name:
            yield f"{at}.model", "must be a name for a remote tier"
        if any(each.dollars_per_gpu_hour is None for each in types):
            yield f"{at}.remote", "the cluster needs dollars_per_gpu_hour, which prices of tokens are added to"
        for name in OF_REMOTE_TIERS:
            if getattr(tier.remote, name) is None:
                yield f"{at}.remote.{name}", "missing"
    if len(drafters) > MAX_DRAFTERS:
        yield f"{at}.speculation.drafters", f"must be at most {MAX_DRAFTERS}, not {len(drafters)}"
    names = [drafter.model.name for drafter in drafters]
    for j, drafter in enumerate(drafters):
        here = f"{at}.speculation.drafters[{j}]"
        if drafter.acceptance is None:
            yield f"{here}.acceptance", "missing"
        if not drafter.model.name:
            yield f"{here}.model.name", "is needed for a shape: workers load the model by it"
        elif names.index(drafter.model.name) < j:
            yield f"{here}.model", f"'{drafter.model.name}' is drafters[{names.index(drafter.model.name)}], too"
        if drafter.model.name and drafter.model.name == tier.model.name:
            yield f"{here}.model", "must be another model than the tier's own"


def _judge_problems(judge: CascadeJudge, tiers: Sequence[str]) -> Iterator[tuple[str, str]]:
    at = "models.judge"
    if len(tiers) == 1:
        yield at, "the answers of a single tier are not judged"
    if bool(judge.tier) == bool(judge.model):
        yield at, "give either tier or model"
        return
    for name in OF_JUDGE_MODELS if judge.tier else OF_GRADING_TIERS:
        if getattr(judge, name) is not None:
            yield f"{at}.{name}", f"not with {'tier' if judge.tier else 'model'}"
    if judge.model and judge.token_s is None:
        yield f"{at}.token_s", "is needed for a model: how long the judge takes per token"
    if judge.tier and judge.tier not in tiers:
        yield f"{at}.tier", f"'{judge.tier[:80]}' is none of the tiers: {', '.join(tiers)}"


def _model(tier: CascadeTier, at: str) -> ModelSpec:
    if tier.remote is not None:
        return ModelSpec(tier.model.name, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)  # takes no memory of ours
    return model_spec(tier.model, at, tier.name)


def _remote(api: RemoteApi) -> RemoteTier:
    def per_s(per_minute: float | None) -> float:
        return math.inf if per_minute is None else per_minute / 60

    return RemoteTier(
        api.first_token_s or 0.0,
        api.token_s or 0.0,
        (api.dollars_per_million_input_tokens or 0.0) / 1e6,
        (api.dollars_per_million_output_tokens or 0.0) / 1e6,
        per_s(api.requests_per_minute),
        per_s(api.tokens_per_minute),
    )


def _speculation(tier: CascadeTier, at: str) -> TierSpeculation:
    specs = [
        (model_spec(drafter.model, f"{at}.drafters[{j}].model"), drafter.acceptance or 0.0)
        for j, drafter in enumerate(tier.speculation.drafters)
    ]
    drafters = sorted(specs, key=lambda pair: pair[0].parameters)
    return TierSpeculation(tuple(drafters), tier.speculation.max_window, tier.speculation.context_tokens)


def _measured(replicas: Sequence[MeasuredReplica], types: Sequence[ClusterSpec], at: str) -> tuple[Replica, ...]:
    """Replicas on the types of GPU that they were measured on. InvalidRequest where that is none of the cluster's."""
    if len(types) == 1:
        return tuple(replica_of(measured, f"{at}[{j}]") for j, measured in enumerate(replicas))
    names = {kind.gpu.name: kind.name for kind in reversed(types)}  # of types with the same GPU the first
    for j, measured in enumerate(replicas):
        if measured.gpu not in names:
            gpus = ", ".join(each.gpu.name for each in types)
            problem = f"measured on '{measured.gpu}', which is none of the cluster's GPUs: {gpus}"
            raise invalid(f"{at}[{j}].gpu", problem)
    return tuple(replica_of(each, f"{at}[{j}]", names[each.gpu]) for j, each in enumerate(replicas))


def _grading(judge: CascadeJudge, tiers: Sequence[str]) -> Grading:
    if judge.tier:
        question = QUESTION_TOKENS if judge.question_tokens is None else judge.question_tokens
        return Grading(tiers.index(judge.tier), question, judge.reply_tokens or REPLY_TOKENS)
    latency, usual = StepLatencyModel.linear(judge.pass_s or 0.0, judge.token_s or 0.0, 0.0), MeshJudge()
    limits = EngineLimits(judge.max_batch or usual.max_batch, judge.max_batch_tokens or usual.max_batch_tokens)
    return Grading.by_judge_model(len(tiers), judge.model, judge.replicas or 1, latency, limits)
