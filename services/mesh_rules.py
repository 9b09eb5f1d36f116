"""Rules between the fields of a mesh file: each field is valid by itself, but they contradict each other. No I/O."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from services.domain.errors import FieldProblem, InvalidRequest
from services.settings import MAX_PORT, MeshFile, processes_problem


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
        needed, gpus = tier.sglang.tp * tier.sglang.pp * tier.sglang.dp, len(tier.sglang.gpus)
        if gpus and gpus < needed * tier.workers:
            yield FieldProblem(f"tiers[{i}].sglang.gpus", f"{gpus} for {tier.workers} workers of {needed}")


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


def _scorer_problems(mesh: MeshFile) -> Iterator[FieldProblem]:
    for i, scorer in enumerate(mesh.judge.scorers):
        field = f"judge.scorers[{i}]"
        if scorer.kind == "judge-model" and not scorer.model:
            yield FieldProblem(f"{field}.model", "missing: a judge-model scorer needs a model")
        if scorer.kind == "llm" and bool(scorer.tier) == bool(scorer.endpoint and scorer.model):
            yield FieldProblem(field, "an llm scorer needs either tier, or endpoint and model")
        if scorer.kind == "llm" and scorer.timeout_s > mesh.router.judge_timeout_s:
            yield FieldProblem(
                f"{field}.timeout_s",
                f"{scorer.timeout_s:g} s, but router.judge_timeout_s is {mesh.router.judge_timeout_s:g} s: "
                "routers would give up before the scorer can answer",
            )
        if scorer.tier and scorer.tier not in {tier.name for tier in mesh.tiers}:
            yield FieldProblem(f"{field}.tier", f"no tier '{scorer.tier}'")
    names = [scorer.name for scorer in mesh.judge.scorers]
    if not names:
        yield FieldProblem("judge.scorers", "at least one is needed")
    if len(set(names)) != len(names):
        yield FieldProblem("judge.scorers", "names must differ")
    if mesh.judge.default_scorer and mesh.judge.default_scorer not in names:
        yield FieldProblem("judge.default_scorer", f"no scorer '{mesh.judge.default_scorer}' among {names}")


def _replan_problems(mesh: MeshFile) -> Iterator[FieldProblem]:
    replan = mesh.planner.replan
    if not replan.enabled:
        return
    for name in ("cluster", "models", "trace", "quality"):
        if not getattr(replan, name):
            yield FieldProblem(f"planner.replan.{name}", "missing: needed to plan again")
    if (replan.min_quality is None) == (replan.max_latency_s is None):
        yield FieldProblem("planner.replan", "give either min_quality or max_latency_s")
