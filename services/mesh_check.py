"""Everything that is wrong with a mesh file, as far as it can be known without starting the mesh."""

import copy
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from services.domain.errors import FieldProblem
from services.model_folder import looks_like_hub_id
from services.settings import (
    FIELDS_ALONE,
    MeshFile,
    ServiceSettings,
    SettingsError,
    environment_value,
    field_problems,
    read_mesh_data,
)

ROUNDS = 5  # of mending what is at fault to see what else is
STAND_INS = {"name": "stand-in-{}", "kind": "exact"}  # of fields without a default


def mesh_file_problems(path: Path) -> list[FieldProblem]:
    """The faults of a mesh file, each with the path of its field; none: `penstock up` can start what it describes.

    Faults within fields hide those between fields, so what is at fault is left out, or replaced where it is needed, and the
    rest is checked again.
    """
    try:
        data: dict[str, Any] = copy.deepcopy(read_mesh_data(path))
    except SettingsError as error:
        return list(error.problems)
    found: list[FieldProblem] = []
    for _ in range(ROUNDS):
        try:
            mesh = MeshFile.model_validate(data, context=FIELDS_ALONE)
        except ValidationError as error:
            found += [p for p in field_problems(error) if not _follows_from(p.field, [known.field for known in found])]
            mended = [_mended(data, fault["loc"], missing=fault["type"] == "missing") for fault in error.errors()]
            if not all(mended):
                return found
        else:
            known = [problem.field for problem in found]
            rest = [*mesh.disagreements()]
            try:
                settings = ServiceSettings.load(mesh_file=path)
                rest += _outside(mesh, settings)
                settings.processes_of_router(mesh)
            except SettingsError as error:  # of the environment, which every service reads
                rest += error.problems
            return found + [p for p in rest if not _follows_from(p.field, known)]
    return found


def _outside(mesh: MeshFile, settings: ServiceSettings) -> Iterator[FieldProblem]:
    """What a sound mesh file names and is not there: folders, files, environment variables, judges."""
    for i, tier in enumerate(mesh.tiers):
        if tier.engine != "simulated" and tier.model:
            yield from _model_problems(tier.model, settings, f"tiers[{i}].model")
        if tier.engine == "sglang" and tier.sglang.python and shutil.which(tier.sglang.python) is None:
            yield FieldProblem(f"tiers[{i}].sglang.python", f"no program {tier.sglang.python}")
    if len(mesh.tiers) > 1 and not mesh.judge.replicas:
        yield FieldProblem("judge.replicas", f"0, but the thresholds of {len(mesh.tiers)} tiers need a judge")
    for i, scorer in enumerate(mesh.judge.scorers if mesh.judge.replicas else ()):
        where = f"judge.scorers[{i}]"
        if scorer.kind == "judge-model" and scorer.model:
            yield from _model_problems(scorer.model, settings, f"{where}.model")
        if scorer.calibration and not settings.resolve(scorer.calibration).is_file():
            yield FieldProblem(f"{where}.calibration", f"no file {settings.resolve(scorer.calibration)}")
        if scorer.api_key_env and environment_value(scorer.api_key_env) is None:
            yield FieldProblem(f"{where}.api_key_env", f"the environment variable {scorer.api_key_env} is not set")
    replan = mesh.planner.replan
    for name in ("cluster", "models", "trace", "quality") if replan.enabled else ():
        file = settings.resolve(getattr(replan, name))
        if not file.is_file():
            yield FieldProblem(f"planner.replan.{name}", f"no file {file}")


def _model_problems(model: str, settings: ServiceSettings, field: str) -> Iterator[FieldProblem]:
    """A model is a folder in Hugging Face format, or an id of the hub, which is not looked up."""
    folder = settings.resolve(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            yield FieldProblem(field, f"{folder} is no model in Hugging Face format: it has no config.json")
    elif not looks_like_hub_id(model):
        yield FieldProblem(field, f"no folder {folder}")


def _follows_from(field: str, known: Sequence[str]) -> bool:
    """Whether a fault may come of mending those that are known: it is of the same field, of a part of it, or around it.

    Whether a model is needed depends on the engine.
    """
    if field.endswith(".model") and f"{field.removesuffix('model')}engine" in known:
        return True
    return any(
        not k or field == k or field.startswith((f"{k}.", f"{k}[")) or k.startswith((f"{field}.", f"{field}["))
        for k in known
    )


def _mended(data: Any, location: Sequence[str | int], *, missing: bool) -> bool:
    """Leave out the field at a location, or put a stand-in there where it is missing; False where neither is possible."""
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
