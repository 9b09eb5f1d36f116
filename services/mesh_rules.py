"""Rules between the fields of a mesh file: each field is valid by itself, but they contradict each other. No I/O."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from services.domain.errors import FieldProblem, InvalidRequest
from services.mesh_schema import MAX_PORT, MeshFile, MeshScorer, SglangMeshEngine, processes_problem


@dataclass(frozen=True, slots=True)
class _Ports:
    """Consecutive ports that the processes of one kind listen on."""

    field: str
    first: int
    count: int
    processes: str

    @property
    def last(self) -> int:
        return self.first + self.count - 1


def disagreements(mesh: MeshFile) -> Iterator[FieldProblem]:
    """All problems between the fields of a mesh file."""
    yield from _plan_problems(mesh)
    yield from _tier_problems(mesh)
    yield from _port_problems(mesh)
    if problem := processes_problem(mesh.router.processes, mesh.router):
        yield FieldProblem("router.processes", problem)
    if problem := redis_url_problem(mesh.redis_url):
        yield FieldProblem("redis_url", problem)
    yield from _access_problems(mesh)
    yield from _tls_problems(mesh)
    yield from _scorer_problems(mesh)
    yield from _slo_problems(mesh)
    yield from _replan_problems(mesh)


def redis_url_problem(url: str) -> str:
    """The problem with the URL of a Redis; empty for a valid URL and for an empty one."""
    if not url:
        return ""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        return "must be redis://HOST:PORT/NUMBER, rediss:// or unix://"
    try:
        port = parts.port
    except ValueError:
        return f"the port must be a number up to {MAX_PORT}"
    return "names no host" if parts.scheme != "unix" and not parts.hostname and port is None else ""


def _plan_problems(mesh: MeshFile) -> Iterator[FieldProblem]:
    try:
        mesh.plan("check").validate()
    except InvalidRequest as error:
        yield from (FieldProblem(p.field.removeprefix("plan."), p.problem) for p in error.problems)


def _tier_problems(mesh: MeshFile) -> Iterator[FieldProblem]:
    for i, tier in enumerate(mesh.tiers):
        if not tier.model and tier.engine != "simulated":
            yield FieldProblem(f"tiers[{i}].model", f"missing: the {tier.engine} engine needs a model")
        if tier.engine == "openai":
            yield from _endpoint_problems(tier.openai.endpoints, f"tiers[{i}].openai.endpoints")
        yield from _flag_problems(tier.sglang, f"tiers[{i}].sglang")
        if tier.sglang.adapter and tier.engine != "sglang":
            yield FieldProblem(f"tiers[{i}].sglang.adapter", f"only SGLang adapts models; the engine is {tier.engine}")
        if tier.sglang.adapter and tier.sglang.kv_store:
            yield FieldProblem(f"tiers[{i}].sglang.kv_store", "servers with an adapter do not share KV: leave it out")
        yield from _drafter_problems(mesh, i)
        if tier.skip_below is not None and not mesh.router.score_predictor:
            yield FieldProblem(f"tiers[{i}].skip_below", "needs router.score_predictor, which is not set")
        for name, size in (("ep", tier.sglang.ep), ("attn_dp", tier.sglang.attn_dp)):
            if tier.sglang.tp % size:
                yield FieldProblem(f"tiers[{i}].sglang.{name}", f"must divide tp, {tier.sglang.tp}, not {size}")
        if tier.sglang.attn_dp > 1 and tier.sglang.dp > 1:
            yield FieldProblem(f"tiers[{i}].sglang.attn_dp", "must not be combined with dp: SGLang refuses both")
        if tier.engine == "sglang" and tier.batch_policy == "slo":
            for name, problem in slo_shape_problems(tier.sglang.dp, tier.sglang.attn_dp):
                yield FieldProblem(f"tiers[{i}].batch_policy", f"slo needs sglang.{name} 1, {problem}")
        needed, gpus = tier.sglang.tp * tier.sglang.pp * tier.sglang.dp, len(tier.sglang.gpus)
        if gpus and gpus < needed * tier.workers:
            yield FieldProblem(f"tiers[{i}].sglang.gpus", f"{gpus} for {tier.workers} workers of {needed}")


def slo_shape_problems(dp: int, attn_dp: int) -> Iterator[tuple[str, str]]:
    """(size, problem) of an SGLang server whose steps a worker cannot predict for SLOs.

    A worker predicts one batch and one pool of KV. A server with several distributes requests over them itself.
    """
    for name, size, part in (("dp", dp, "copy of the model"), ("attn_dp", attn_dp, "group of attention")):
        if size > 1:
            own = f"each {part} has a batch and KV of its own, and the server chooses one for a request"
            yield name, f"not {size}: {own}, so a worker cannot predict what can be kept"


def _drafter_problems(mesh: MeshFile, index: int) -> Iterator[FieldProblem]:
    tier, field = mesh.tiers[index], f"tiers[{index}].speculation.drafters"
    if tier.speculation.drafters and tier.engine != "torch":
        yield FieldProblem(field, f"only torch engines draft, and this tier's engine is {tier.engine}")
    if tier.speculation.drafters == "auto":
        return
    models = {other.name: other.model for other in mesh.tiers}
    for j, drafter in enumerate(tier.speculation.drafters):
        model = models.get(drafter, drafter)
        if drafter == tier.name or model == tier.model:
            yield FieldProblem(f"{field}[{j}]", "must be another model than the tier's own")
        elif not model:
            yield FieldProblem(f"{field}[{j}]", f"tier '{drafter}' has no model")


def _endpoint_problems(endpoints: Sequence[str], path: str) -> Iterator[FieldProblem]:
    if not endpoints:
        yield FieldProblem(path, "missing: the openai engine needs a base URL, such as http://127.0.0.1:8001/v1")
    for j, endpoint in enumerate(endpoints):
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield FieldProblem(f"{path}[{j}]", "must be http://HOST:PORT/v1 or https://HOST/v1")
        elif parts.username or parts.password:
            yield FieldProblem(f"{path}[{j}]", "must hold no password: name a variable with the key in key_env")


UNSUPPORTED_SGLANG_FLAGS = {
    "--nnodes": "a worker starts servers on its own machine: start one of several machines yourself, and set endpoint",
    "--node-rank": "see --nnodes",
    "--dist-init-addr": "see --nnodes",
    "--enable-lora": "set sglang.adapter, the adapter that the tier serves its model with",
    "--lora-paths": "see --enable-lora",
    "--disaggregation-mode": "workers need servers that compute prompts and replies",
    "--is-embedding": "workers need servers that generate",
    "--api-key": "workers do not send a key",
}
"""Flags of SGLang servers that no worker can work with, and why."""


def _flag_problems(server: SglangMeshEngine, path: str) -> Iterator[FieldProblem]:
    for j, flag in enumerate(server.flags):
        if (reason := UNSUPPORTED_SGLANG_FLAGS.get(flag.partition("=")[0])) is not None:
            yield FieldProblem(f"{path}.flags[{j}]", f"{flag.partition('=')[0]} is not supported: {reason}")


def _port_problems(mesh: MeshFile) -> Iterator[FieldProblem]:
    """Problems of fixed ports. Port 0 means any free port, so it cannot conflict."""
    routers = mesh.router.replicas
    ranges = [
        _Ports("router.grpc_port", mesh.router.grpc_port, routers, "routers"),
        _Ports("router.http_port", mesh.router.http_port, routers, "routers"),
        _Ports("router.admin_port", mesh.router.admin_port, routers, "routers"),
        *(
            _Ports(f"tiers[{i}].sglang.port", tier.sglang.port, tier.workers, "SGLang servers")
            for i, tier in enumerate(mesh.tiers)
            if tier.engine == "sglang" and not tier.sglang.endpoint and tier.workers
        ),
    ]
    fixed = [ports for ports in ranges if ports.first]
    for ports in fixed:
        if ports.last > MAX_PORT:
            yield FieldProblem(
                ports.field, f"{ports.first} leaves no ports for {ports.count} {ports.processes} below {MAX_PORT + 1}"
            )
    for first, second in itertools.combinations(fixed, 2):
        if first.first <= second.last and second.first <= first.last:
            yield FieldProblem(
                second.field,
                f"ports {second.first} to {second.last} overlap {first.field}, which is {first.first} to {first.last}: "
                "each process takes a port of its own",
            )


def _access_problems(mesh: MeshFile) -> Iterator[FieldProblem]:
    names, models = [tenant.name for tenant in mesh.access.tenants], {"cascade", *(tier.name for tier in mesh.tiers)}
    if len(set(names)) != len(names):
        yield FieldProblem("access.tenants", "names must differ")
    if names and not mesh.access.keys:
        yield FieldProblem("access.keys", "missing: tenants are recognised by their keys")
    for i, tenant in enumerate(mesh.access.tenants):
        for model in tenant.models:
            if model not in models:
                yield FieldProblem(
                    f"access.tenants[{i}].models", f"no model '{model}' among {', '.join(sorted(models))}"
                )


def _tls_problems(mesh: MeshFile) -> Iterator[FieldProblem]:
    if bool(mesh.tls.client_certificate) != bool(mesh.tls.client_key):
        yield FieldProblem("tls", "client_certificate and client_key belong together")
    if mesh.tls.client_certificate and not mesh.tls.folder:
        yield FieldProblem("tls.folder", "missing: with TLS for clients, services need certificates, too")


TIMED_SCORERS = ("llm", "reward", "consistency", "code")  # their timeout_s is used
FIXED_BODY = ("model", "messages", "stream", "n", "logprobs", "top_logprobs", "max_tokens", "temperature")


def _scorer_problems(mesh: MeshFile) -> Iterator[FieldProblem]:
    names = [scorer.name for scorer in mesh.judge.scorers]
    for i, scorer in enumerate(mesh.judge.scorers):
        field = f"judge.scorers[{i}]"
        yield from _missing_for_kind(scorer, field)
        if scorer.kind in TIMED_SCORERS and scorer.timeout_s > mesh.router.judge_timeout_s:
            yield FieldProblem(
                f"{field}.timeout_s",
                f"{scorer.timeout_s:g} s, but router.judge_timeout_s is {mesh.router.judge_timeout_s:g} s: "
                "routers would give up before the scorer can answer",
            )
        if scorer.tier and scorer.tier not in {tier.name for tier in mesh.tiers}:
            yield FieldProblem(f"{field}.tier", f"no tier '{scorer.tier}'")
        for name in FIXED_BODY:
            if name in scorer.extra_body:
                yield FieldProblem(f"{field}.extra_body.{name}", "is set by the scorer itself")
        for name in scorer.scorers:
            if name not in names[:i]:
                yield FieldProblem(f"{field}.scorers", f"no scorer '{name}' above this one")
            elif scorer.kind == "combined" and mesh.judge.scorers[names.index(name)].kind == "screened":
                yield FieldProblem(f"{field}.scorers", f"'{name}' is screened: it has no raw scores to combine")
    if mesh.router.flag_below is not None and not mesh.judge.replicas:
        yield FieldProblem("router.flag_below", "needs a judge, but judge.replicas is 0")
    if not names:
        yield FieldProblem("judge.scorers", "at least one is needed")
    if len(set(names)) != len(names):
        yield FieldProblem("judge.scorers", "names must differ")
    if mesh.judge.default_scorer and mesh.judge.default_scorer not in names:
        yield FieldProblem("judge.default_scorer", f"no scorer '{mesh.judge.default_scorer}' among {names}")


def _slo_problems(mesh: MeshFile) -> Iterator[FieldProblem]:
    for name, objectives in mesh.slo.classes.items():
        field = f"slo.classes.{name}"
        if objectives.time_per_output_token_s is not None and objectives.phases:
            yield FieldProblem(f"{field}.phases", "must not be combined with time_per_output_token_s")
            continue
        for problem in objectives.slo().problems(field):
            yield FieldProblem(problem.field.replace("from_output_token_count", "from_output_token"), problem.problem)


def _missing_for_kind(scorer: MeshScorer, field: str) -> Iterator[FieldProblem]:
    match scorer.kind:
        case "judge-model" if not scorer.model:
            yield FieldProblem(f"{field}.model", "missing: a judge-model scorer needs a model")
        case "llm" if bool(scorer.tier) == bool(scorer.endpoint and scorer.model):
            yield FieldProblem(field, "an llm scorer needs either tier, or endpoint and model")
        case "reward" if not (scorer.endpoint and scorer.model):
            yield FieldProblem(field, "a reward scorer needs endpoint and model")
        case "combined":
            if len(scorer.scorers) < 2:
                yield FieldProblem(f"{field}.scorers", "a combined scorer needs at least two")
            if not scorer.calibration:
                yield FieldProblem(f"{field}.calibration", "missing: the file with the fitted weights")
        case "screened":
            if len(scorer.scorers) != 2:
                yield FieldProblem(f"{field}.scorers", "a screened scorer needs two: the cheap one and the other")
            if scorer.calibration:
                yield FieldProblem(f"{field}.calibration", "a screened scorer has none: its parts have")


def _replan_problems(mesh: MeshFile) -> Iterator[FieldProblem]:
    replan = mesh.planner.replan
    if not replan.enabled:
        return
    for name in ("cluster", "models", "trace", "quality"):
        if not getattr(replan, name):
            yield FieldProblem(f"planner.replan.{name}", "missing: needed to plan again")
    if (replan.min_quality is None) == (replan.max_latency_s is None):
        yield FieldProblem("planner.replan", "give either min_quality or max_latency_s")
