"""Finds all problems of a mesh file that can be found without starting the mesh."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from penstock.question_files.errors import FileError
from penstock.question_files.questions import load_question
from penstock.services.domain.score_prediction import PredictorError
from penstock.services.extensions.engines import engine_of, tier_problems
from penstock.services.extensions.scorers import (
    asked_scorers,
    asks_for_logprobs,
    is_calibrated,
    scorer_of,
    scorer_problems,
    unused_judge_fields,
)
from penstock.services.field_problems import SettingsError, field_problems
from penstock.services.mesh_file import read_mesh_data
from penstock.services.mesh_rules import Ports, disagreements, port_problems
from penstock.services.mesh_schema.judge import WITHOUT_LOGPROBS, MeshScorer
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.score_predictor_file import read_score_predictor
from penstock.services.settings import ServiceSettings
from penstock.types.judging import ScorerInfo
from penstock.types.problems import FieldProblem


@dataclass(frozen=True, slots=True)
class Findings:
    """What is wrong, with the paths of its fields. problems: `penstock up` cannot start the mesh. notes: what is hardly
    meant, or is missing on this machine, where the mesh need not run."""

    problems: list[FieldProblem]
    notes: list[FieldProblem]


def check_mesh_file(path: Path, *, here: bool = False) -> Findings:
    """What is wrong with a mesh file. here: what this machine lacks is a problem, as it is for `penstock up`.

    What is between fields, and outside the file, is looked at where each field is right by itself.
    """
    try:
        mesh = MeshFile.model_validate(read_mesh_data(path))
    except SettingsError as error:
        return Findings(list(error.problems), [])
    except ValidationError as error:
        return Findings(field_problems(error, MeshFile), [])
    problems, of_host = [*disagreements(mesh)], list[FieldProblem]()
    try:
        settings = ServiceSettings.load(mesh_file=path)
        for tier in mesh.tiers:
            problems += tier_problems(mesh, tier, settings)
            of_host += tier_problems(mesh, tier, settings, of_host=True)
        for scorer in mesh.judge.scorers if mesh.judge.replicas else ():
            problems += scorer_problems(mesh, scorer, settings)
            of_host += scorer_problems(mesh, scorer, settings, of_host=True)
        problems += unused_judge_fields(mesh) if mesh.judge.replicas else ()
        problems += _server_port_problems(mesh)
        problems += _missing_outside(mesh, settings)
        settings.processes_of_router(mesh)
    except SettingsError as error:  # in the environment, which every service reads
        problems += error.problems
    notes = [*_remarks(mesh)]
    if not problems and not of_host:
        notes += _uncalibrated(mesh, path)
    return Findings([*problems, *of_host], notes) if here else Findings(problems, [*of_host, *notes])


def _server_port_problems(mesh: MeshFile) -> Iterator[FieldProblem]:
    """Problems of the fixed ports of servers that workers start."""
    ranges = []
    for i, tier in enumerate(mesh.tiers):
        with contextlib.suppress(SettingsError):  # found by `tier_problems`
            for field, first in engine_of(mesh, tier).ports(tier) if tier.workers else ():
                ranges.append(Ports(f"tiers[{i}].{field}", first, tier.workers, "servers"))
    known = {*port_problems(mesh)}
    yield from (problem for problem in port_problems(mesh, ranges) if problem not in known)


def _default_scorer(mesh: MeshFile) -> MeshScorer | None:
    """The scorer of answers between tiers; None without one."""
    if not mesh.judge.replicas or len(mesh.tiers) == 1:
        return None
    return next((each for each in mesh.judge.scorers if each.name == mesh.judge.used_scorer), None)


def judging(mesh: MeshFile, gives_logprobs: Mapping[str, bool | None]) -> Iterator[str]:
    """How answers that may escalate are judged, and what a score costs, a line each.

    gives_logprobs: whether replies of a tier come with log-probabilities; None: it is not known.

    Raises:
        SettingsError: A scorer has a problem.
    """
    scorer = _default_scorer(mesh)
    if scorer is None:
        return
    costs = {each.name: cost for each in asked_scorers(mesh, scorer) if (cost := scorer_of(mesh, each).cost())}
    if scorer.name != WITHOUT_LOGPROBS or "grade" not in costs:
        spent = "; ".join(f"{name}: {cost}" for name, cost in costs.items()) or "no further cost"
        yield f"answers are judged by {scorer.name}: {spent}"
        for tier in mesh.tiers[:-1] if asks_for_logprobs(mesh, scorer) else ():
            if gives_logprobs.get(tier.name) is False:
                yield f"answers of {tier.name} come without the log-probabilities that {scorer.name} needs: all escalate"
        return
    free = "judged by their log-probabilities and the examples that prompts show: no further cost"
    paid = f"judged by the examples that prompts show, or a grade, which costs {costs['grade']}"
    for tier in mesh.tiers[:-1]:
        gives = gives_logprobs.get(tier.name)
        with_them, without = f"with log-probabilities are {free}", f"without log-probabilities are {paid}"
        parts = {True: [with_them], False: [without], None: [with_them, without]}[gives]
        yield f"answers of {tier.name} " + "; ".join(parts)


def _remarks(mesh: MeshFile) -> Iterator[FieldProblem]:
    """What is valid and hardly meant."""
    limits: list[tuple[str, float | None]] = [("router.flag_below", mesh.router.flag_below)]
    for i, tier in enumerate(mesh.tiers):
        at = f"tiers[{i}]"
        limits += [(f"{at}.threshold", tier.threshold), (f"{at}.skip_below", tier.skip_below)]
        limits += [(f"{at}.long_answers.threshold", tier.long_answers.threshold)] if tier.long_answers else []
    for field, limit in limits:
        if limit is not None and 0 < limit <= 1:
            yield FieldProblem(field, f"{limit:g} of 100: scores are from 0 to 100, so {100 * limit:g} may be meant")
    scorer = _default_scorer(mesh)
    with contextlib.suppress(SettingsError):  # a problem of the scorer
        if scorer is not None and scorer_of(mesh, scorer).needs_reference():
            problem = f"'{scorer.name}' needs an expected answer, which requests of clients do not have"
            yield FieldProblem("judge.default_scorer", problem)


def _uncalibrated(mesh: MeshFile, path: Path) -> Iterator[FieldProblem]:
    scorer = _default_scorer(mesh)
    with contextlib.suppress(SettingsError):  # a problem of the scorer, or of the environment
        if scorer is not None and not is_calibrated(mesh, scorer, ServiceSettings.load(mesh_file=path)):
            yield FieldProblem("judge", ScorerInfo(scorer.name).warning)


def _missing_outside(mesh: MeshFile, settings: ServiceSettings) -> Iterator[FieldProblem]:
    """Folders, files, environment variables and judges that a mesh file refers to and that do not exist."""
    if len(mesh.tiers) > 1 and not mesh.judge.replicas:
        yield FieldProblem("judge.replicas", f"0, but the thresholds of {len(mesh.tiers)} tiers need a judge")
    if mesh.router.score_predictor:
        try:
            read_score_predictor(settings.resolve(mesh.router.score_predictor))
        except PredictorError as error:
            yield FieldProblem("router.score_predictor", str(error))
    replan = mesh.planner.replan
    if replan.enabled and replan.question:
        try:
            load_question(settings.resolve(replan.question))
        except FileError as error:
            yield FieldProblem("planner.replan.question", str(error))
