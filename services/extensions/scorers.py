"""What a scorer must say of itself, and the checks of a scorer by its kind."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel

from penstock.services.extensions.lookup import SCORERS, extension, validated, within
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_schema.common import FROZEN
from penstock.services.mesh_schema.judge import MeshScorer
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.model_folder import folder_problem, model_problem
from penstock.services.settings import ServiceSettings, environment_value
from penstock.types.problems import FieldProblem

JUDGE_FIELDS = frozenset({"device", "max_batch", "max_batch_tokens"})
"""The fields of the judge that are for its scorers, which need not use them."""


class ScorerOptions(BaseModel):
    """The options of a scorer, in `judge.scorers[]` in addition to name, kind and calibration. Light to import: no torch."""

    model_config = FROZEN

    judge_fields: ClassVar[frozenset[str]] = frozenset()
    """Those of JUDGE_FIELDS that the scorer uses."""
    has_raw_scores: ClassVar[bool] = True
    """Whether it has raw scores, which can be calibrated and combined."""
    needs_logprobs: ClassVar[bool] = False
    """Whether answers need the logprobs of their tokens."""
    key_variable: ClassVar[str] = ""
    """The option that names an environment variable which must be set, if there is one."""

    def needs_reference(self) -> bool:
        """Whether answers need an expected answer, which requests of clients do not have."""
        return False

    def verifies(self) -> bool:
        """Whether its scores are facts, which need no calibration."""
        return self.needs_reference()

    def cost(self) -> str:
        """What a score costs in addition to the judge's own work, such as calls of a model; empty for nothing."""
        return ""

    def stated_weight(self) -> tuple[float, float] | None:
        """(weight, mean) of its raw score in a combination that is not fitted; None: it has none."""
        return None

    def problems(self, scorer: MeshScorer, mesh: MeshFile) -> Iterator[FieldProblem]:
        """What makes a judge refuse to run, on every machine. Fields are those of the scorer."""
        yield from ()

    def models(self) -> Iterator[tuple[str, str]]:
        """(option, folder or id at the hub) of what the judge loads."""
        yield from ()

    def files(self) -> Iterator[tuple[str, str]]:
        """(option, path) of files that the judge reads in addition to the calibration."""
        yield from ()

    def parts(self) -> tuple[str, ...]:
        """The names of the scorers that it asks."""
        return ()


def scorer_of(mesh: MeshFile, scorer: MeshScorer) -> ScorerOptions:
    """The options of a scorer.

    Raises:
        SettingsError: There is no such kind, or the options are bad; names the fields.
    """
    field = scorer_field(mesh, scorer)
    return validated(extension(SCORERS, scorer.kind, ScorerOptions, f"{field}.kind"), scorer.options, field)


def scorer_field(mesh: MeshFile, scorer: MeshScorer) -> str:
    """The path of a scorer in the mesh file."""
    return f"judge.scorers[{[each.name for each in mesh.judge.scorers].index(scorer.name)}]"


def scorer_problems(
    mesh: MeshFile, scorer: MeshScorer, settings: ServiceSettings, *, of_host: bool = False
) -> list[FieldProblem]:
    """What makes a judge refuse to run with this scorer, on every machine that has the mesh file's folder.

    of_host: instead, what this machine lacks that a judge with this scorer needs.
    """
    try:
        options = scorer_of(mesh, scorer)
    except SettingsError as error:
        return [] if of_host else list(error.problems)
    problems = [] if of_host else [*options.problems(scorer, mesh), *_part_problems(options, scorer, mesh)]
    problems += [problem for problem, lacks in _missing(options, scorer, settings) if lacks is of_host]
    return within(scorer_field(mesh, scorer), problems)


def unused_judge_fields(mesh: MeshFile) -> Iterator[FieldProblem]:
    """Fields of the judge that none of its scorers uses."""
    used = frozenset[str]()
    for scorer in mesh.judge.scorers:
        try:
            used |= scorer_of(mesh, scorer).judge_fields
        except SettingsError:  # as in `scorer_problems`: it might use them
            return
    for field in sorted((mesh.judge.model_fields_set & JUDGE_FIELDS) - used):
        yield FieldProblem(f"judge.{field}", "no scorer uses it: leave it out")


def asks_for_logprobs(mesh: MeshFile, scorer: MeshScorer) -> bool:
    """Whether a scorer, or one that it asks, needs the logprobs of answers."""
    return any(scorer_of(mesh, each).needs_logprobs for each in asked_scorers(mesh, scorer))


def asked_scorers(mesh: MeshFile, scorer: MeshScorer) -> Iterator[MeshScorer]:
    """A scorer, and all that it asks."""
    yield scorer
    for part in _parts(mesh, scorer, scorer_of(mesh, scorer)):
        yield from asked_scorers(mesh, part)


def is_calibrated(mesh: MeshFile, scorer: MeshScorer, settings: ServiceSettings) -> bool:
    """Whether a scorer's scores are shares of right answers: it has a calibration, or is sure, or all that it asks are.

    Raises:
        SettingsError: The scorer has a problem.
    """
    options = scorer_of(mesh, scorer)
    of_models = (settings.resolve(model) / "calibration.json" for _, model in options.models())
    if scorer.calibration or options.verifies() or any(file.is_file() for file in of_models):
        return True
    parts = [] if options.has_raw_scores else _parts(mesh, scorer, options)
    return bool(parts) and all(is_calibrated(mesh, part, settings) for part in parts)


def _parts(mesh: MeshFile, scorer: MeshScorer, options: ScorerOptions) -> list[MeshScorer]:
    before = mesh.judge.scorers[: [each.name for each in mesh.judge.scorers].index(scorer.name)]
    return [each for each in before if each.name in options.parts()]


def _part_problems(options: ScorerOptions, scorer: MeshScorer, mesh: MeshFile) -> Iterator[FieldProblem]:
    if scorer.calibration and not options.has_raw_scores:
        yield FieldProblem("calibration", f"a {scorer.kind} scorer has none: its parts have")
    names = [each.name for each in mesh.judge.scorers]
    for name in options.parts():
        if name not in names[: names.index(scorer.name)]:
            yield FieldProblem("scorers", f"no scorer '{name}' above this one")


def _missing(
    options: ScorerOptions, scorer: MeshScorer, settings: ServiceSettings
) -> Iterator[tuple[FieldProblem, bool]]:
    """(problem, whether another machine may have it) of models, files and variables that are not there."""
    for field, model in options.models():
        folder = settings.resolve(model)
        if model and (problem := model_problem(settings, model)) is not None:
            yield FieldProblem(field, problem.text), problem.of_host
        elif model and folder.is_dir() and (text := folder_problem(folder)):
            yield FieldProblem(field, text), False
    for field, file in (("calibration", scorer.calibration), *options.files()):
        if file and not settings.resolve(file).is_file():
            yield FieldProblem(field, f"no file {settings.resolve(file)}"), Path(file).is_absolute()
    if options.key_variable and (name := getattr(options, options.key_variable)) and environment_value(name) is None:
        yield FieldProblem(options.key_variable, f"the environment variable {name} is not set"), True
