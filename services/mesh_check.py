"""Finds all problems of a mesh file that can be found without starting the mesh."""

import copy
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from services.domain.errors import FieldProblem
from services.domain.score_prediction import PredictorError
from services.field_problems import SettingsError, field_problems
from services.mesh_file import read_mesh_data
from services.mesh_rules import disagreements
from services.mesh_schema import MeshFile
from services.model_folder import looks_like_hub_id
from services.score_predictor_file import read_score_predictor
from services.settings import ServiceSettings, environment_value

MAX_REPAIRS = 5  # passes that repair bad fields to find the problems behind them
STAND_INS = {"name": "stand-in-{}", "kind": "exact"}  # for required fields that are missing


def mesh_file_problems(path: Path) -> list[FieldProblem]:
    """All problems of a mesh file, each with the path of its field; an empty list if `penstock up` can start it.

    Bad fields hide the problems behind them, so each pass removes the bad fields, or replaces the required ones, and checks
    the rest again.
    """
    try:
        data: dict[str, Any] = copy.deepcopy(read_mesh_data(path))
    except SettingsError as error:
        return list(error.problems)
    problems: list[FieldProblem] = []
    for _ in range(MAX_REPAIRS):
        try:
            mesh = MeshFile.model_validate(data)
        except ValidationError as error:
            fields = [problem.field for problem in problems]
            problems += [p for p in field_problems(error, MeshFile) if not _follows_from(p.field, fields)]
            repaired = [_repair(data, fault["loc"], missing=fault["type"] == "missing") for fault in error.errors()]
            if not all(repaired):
                return problems

        else:
            fields = [problem.field for problem in problems]
            more = [*disagreements(mesh)]
            try:
                settings = ServiceSettings.load(mesh_file=path)
                more += _missing_outside(mesh, settings)
                settings.processes_of_router(mesh)
            except SettingsError as error:  # in the environment, which every service reads
                more += error.problems
            return problems + [p for p in more if not _follows_from(p.field, fields)]
    return problems


def _missing_outside(mesh: MeshFile, settings: ServiceSettings) -> Iterator[FieldProblem]:
    """Folders, files, programs, environment variables and judges that a mesh file refers to and that do not exist."""
    for i, tier in enumerate(mesh.tiers):
        key_env = tier.openai.key_env if tier.engine == "openai" else ""
        if key_env and environment_value(key_env) is None:
            yield FieldProblem(f"tiers[{i}].openai.key_env", f"the environment variable {key_env} is not set")
        if tier.engine not in ("simulated", "openai") and tier.model:
            yield from _model_problems(tier.model, settings, f"tiers[{i}].model")
        if tier.engine == "sglang" and tier.sglang.python and shutil.which(tier.sglang.python) is None:
            yield FieldProblem(f"tiers[{i}].sglang.python", f"no program {tier.sglang.python}")
    if len(mesh.tiers) > 1 and not mesh.judge.replicas:
        yield FieldProblem("judge.replicas", f"0, but the thresholds of {len(mesh.tiers)} tiers need a judge")
    for i, scorer in enumerate(mesh.judge.scorers if mesh.judge.replicas else ()):
        where = f"judge.scorers[{i}]"
        if scorer.kind in ("judge-model", "reward") and scorer.model:
            yield from _model_problems(scorer.model, settings, f"{where}.model")
        if scorer.calibration and not settings.resolve(scorer.calibration).is_file():
            yield FieldProblem(f"{where}.calibration", f"no file {settings.resolve(scorer.calibration)}")
        if scorer.schema_file and not settings.resolve(scorer.schema_file).is_file():
            yield FieldProblem(f"{where}.schema_file", f"no file {settings.resolve(scorer.schema_file)}")
        if scorer.api_key_env and environment_value(scorer.api_key_env) is None:
            yield FieldProblem(f"{where}.api_key_env", f"the environment variable {scorer.api_key_env} is not set")
    if mesh.router.score_predictor:
        try:
            read_score_predictor(settings.resolve(mesh.router.score_predictor))
        except PredictorError as error:
            yield FieldProblem("router.score_predictor", str(error))
    replan = mesh.planner.replan
    for name in ("cluster", "models", "trace", "quality") if replan.enabled else ():
        file = settings.resolve(getattr(replan, name))
        if not file.is_file():
            yield FieldProblem(f"planner.replan.{name}", f"no file {file}")


def _model_problems(model: str, settings: ServiceSettings, field: str) -> Iterator[FieldProblem]:
    """A model must be a folder in Hugging Face format or look like an id at the hub, which is not looked up."""
    folder = settings.resolve(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            yield FieldProblem(field, f"{folder} is not a model in Hugging Face format: it has no config.json")
    elif not looks_like_hub_id(model):
        yield FieldProblem(field, f"no folder {folder}")


def _follows_from(field: str, fields: Sequence[str]) -> bool:
    """Whether a problem may be caused by the repair of a known one: it is at the same field, inside it or around it.

    Whether a model is required depends on the engine.
    """
    if field.endswith(".model") and f"{field.removesuffix('model')}engine" in fields:
        return True
    return any(
        not other
        or field == other
        or field.startswith((f"{other}.", f"{other}["))
        or other.startswith((f"{field}.", f"{field}["))
        for other in fields
    )


def _repair(data: Any, location: Sequence[str | int], *, missing: bool) -> bool:
    """Remove the field at a location, or insert a stand-in for a missing one; False if neither is possible."""
    part = data
    for key in location[:-1]:
        try:
            part = part[key]
        except (KeyError, IndexError, TypeError):
            return False
    if not location or not isinstance(part, dict):
        return False
    name = location[-1]
    if missing and name in STAND_INS:
        part[name] = STAND_INS[str(name)].format(location[-2])
        return True
    return part.pop(name, None) is not None
