"""Composes the judge service: scorers, calibrations, servicer."""

from penstock.judge_service.scoring.extension import ScorerExtension, ScorerSite
from penstock.judge_service.scoring.guards import Guard
from penstock.judge_service.scoring.registry import NamedScorer, ScorerRegistry
from penstock.judge_service.servicer import SERVICE, JudgeServicer
from penstock.proto.judge.v1 import judge_pb2_grpc
from penstock.services.extensions.scorers import scorer_of, scorer_problems
from penstock.services.field_problems import SettingsError, joined
from penstock.services.mesh_schema.judge import MeshScorer
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.runtime import Chassis


async def compose(chassis: Chassis) -> None:
    """Load the scorers and add the judge service to the server.

    Raises:
        SettingsError: A scorer cannot be created.
    """
    mesh, judge = chassis.mesh, chassis.mesh.judge
    if problems := [p for scorer in judge.scorers for p in scorer_problems(mesh, scorer, chassis.settings)]:
        raise SettingsError(joined(problems), problems)
    scorers: dict[str, NamedScorer] = {}
    for scorer in judge.scorers:
        site = ScorerSite(mesh, scorer, chassis.settings, scorers)
        scorers[scorer.name] = await read_options(mesh, scorer).registered(site, chassis.stack)
    guards = frozenset(map(Guard, judge.guards))
    registry = ScorerRegistry([*scorers.values()], judge.used_scorer, guards)
    servicer = JudgeServicer(registry, chassis.telemetry, [tier.name for tier in mesh.tiers])
    for server in (chassis.server, chassis.admin):
        judge_pb2_grpc.add_JudgeServiceServicer_to_server(servicer, server)
    chassis.health.offer(SERVICE)


def read_options(mesh: MeshFile, scorer: MeshScorer) -> ScorerExtension:
    """The options of a scorer of the mesh file, as its extension reads them.

    Raises:
        SettingsError: There is no such kind, or the options are bad.
    """
    options = scorer_of(mesh, scorer)
    if not isinstance(options, ScorerExtension):
        raise SettingsError(f"judge.scorers: {scorer.name}: kind: '{scorer.kind}' is no ScorerExtension")
    return options
