"""Rules between the fields of a mesh file: each field is valid by itself, but they contradict each other. No I/O."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.services.acceptance.pipeline import predicting
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.plans import check_plan
from penstock.services.mesh_schema.common import MAX_PORT
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.mesh_schema.router import processes_problem
from penstock.services.redis_url import redis_url_problem
from penstock.types.problems import FieldProblem


@dataclass(frozen=True, slots=True)
class Ports:
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
    yield from port_problems(mesh)
    if problem := processes_problem(mesh.router.processes, mesh.router):
        yield FieldProblem("router.processes", problem)
    if problem := redis_url_problem(mesh.redis_url):
        yield FieldProblem("redis_url", problem)
    yield from _access_problems(mesh)
    yield from _tls_problems(mesh)
    yield from _scorer_problems(mesh)
    for name, objectives in mesh.slo.classes.items():
        yield from objectives.problems(f"slo.classes.{name}")
    if mesh.planner.replan.enabled and not mesh.planner.replan.question:
        yield FieldProblem("planner.replan.question", "missing: needed to plan again")


def _plan_problems(mesh: MeshFile) -> Iterator[FieldProblem]:
    try:
        check_plan(mesh.plan("check"))
    except InvalidRequest as error:
        yield from (FieldProblem(p.field.removeprefix("plan."), p.problem) for p in error.problems)


def _tier_problems(mesh: MeshFile) -> Iterator[FieldProblem]:
    for i, tier in enumerate(mesh.tiers):
        if not mesh.router.score_predictor:
            for field in predicting(tier):
                yield FieldProblem(f"tiers[{i}].{field}", "needs router.score_predictor, which is not set")


def port_problems(mesh: MeshFile, of_engines: Iterable[Ports] = ()) -> Iterator[FieldProblem]:
    """Problems of fixed ports. Port 0 means any free port, so it cannot conflict."""
    router, names = mesh.router, ("grpc_port", "http_port", "admin_port")
    of_routers = [Ports(f"router.{name}", getattr(router, name), router.replicas, "routers") for name in names]
    fixed = [ports for ports in (*of_routers, *of_engines) if ports.first]
    for ports in fixed:
        if ports.last > MAX_PORT:
            problem = f"{ports.first} leaves no ports for {ports.count} {ports.processes} below {MAX_PORT + 1}"
            yield FieldProblem(ports.field, problem)
    for first, second in itertools.combinations(fixed, 2):
        if first.first <= second.last and second.first <= first.last:
            overlap = f"overlap {first.field}, which is {first.first} to {first.last}"
            problem = f"ports {second.first} to {second.last} {overlap}: each process takes a port of its own"
            yield FieldProblem(second.field, problem)


def _access_problems(mesh: MeshFile) -> Iterator[FieldProblem]:
    names, models = [tenant.name for tenant in mesh.access.tenants], {"cascade", *(tier.name for tier in mesh.tiers)}
    if len(set(names)) != len(names):
        yield FieldProblem("access.tenants", "names must differ")
    if names and not mesh.access.keys:
        yield FieldProblem("access.keys", "missing: tenants are recognised by their keys")
    for i, tenant in enumerate(mesh.access.tenants):
        for model in tenant.models:
            if model not in models:
                problem = f"no model '{model}' among {', '.join(sorted(models))}"
                yield FieldProblem(f"access.tenants[{i}].models", problem)


def _tls_problems(mesh: MeshFile) -> Iterator[FieldProblem]:
    if bool(mesh.tls.client_certificate) != bool(mesh.tls.client_key):
        yield FieldProblem("tls", "client_certificate and client_key belong together")
    if mesh.tls.client_certificate and not mesh.tls.folder:
        yield FieldProblem("tls.folder", "missing: with TLS for clients, services need certificates, too")


def _scorer_problems(mesh: MeshFile) -> Iterator[FieldProblem]:
    names = [scorer.name for scorer in mesh.judge.scorers]
    if mesh.router.flag_below is not None and not mesh.judge.replicas:
        yield FieldProblem("router.flag_below", "needs a judge, but judge.replicas is 0")
    if not names:
        yield FieldProblem("judge.scorers", "at least one is needed")
    if len(set(names)) != len(names):
        yield FieldProblem("judge.scorers", "names must differ")
    if mesh.judge.default_scorer and mesh.judge.default_scorer not in names:
        yield FieldProblem("judge.default_scorer", f"no scorer '{mesh.judge.default_scorer}' among {names}")
