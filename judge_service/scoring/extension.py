"""What a scorer registers as an entry point of `penstock.scorers`: its options, which build it."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from pydantic import Field

from penstock.judge_service.calibration.fitted import CalibrationError, Fitted
from penstock.judge_service.scoring.backlog import Backlog
from penstock.judge_service.scoring.interface import RawScore, Scorer
from penstock.judge_service.scoring.registry import NamedScorer, RegisteredScorer
from penstock.services.extensions.scorers import ScorerOptions, asked_scorers, is_calibrated, scorer_of
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_schema.judge import MeshScorer
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.model_folder import model_folder
from penstock.services.settings import ServiceSettings, environment_value
from penstock.types.judging import JudgedAnswer, ScorerInfo
from penstock.types.problems import FieldProblem

_F = TypeVar("_F", bound=Fitted)

SHARE_OF_TIMEOUT = 0.8
"""Of the time that routers wait for a score: the rest is for the way and the queue."""
ANSWER_S = 300.0
"""Of one answer of a calibration. A whole batch is asked for at once and no client waits, so a model has longer than in
service."""


@dataclass(frozen=True, slots=True)
class ScorerSite:
    """The judge that a scorer is for: an entry of the mesh file, and the settings of the process. others: the scorers before
    it, by name."""

    mesh: MeshFile
    scorer: MeshScorer
    settings: ServiceSettings
    others: Mapping[str, NamedScorer]

    def error(self, problem: str) -> SettingsError:
        """An error that names the scorer."""
        return SettingsError(f"judge.scorers: {self.scorer.name}: {problem}")

    def folder(self, model: str) -> Path:
        """The folder of a model.

        Raises:
            SettingsError: There is none.
        """
        folder = model_folder(self.settings, model)
        if not folder.is_dir():
            raise self.error(f"no folder {folder}")
        return folder

    def read(self, kind: type[_F], path: Path) -> _F:
        """A file of what was fitted.

        Raises:
            SettingsError: It is bad.
        """
        try:
            return kind.read(path)
        except CalibrationError as error:
            raise self.error(str(error)) from error

    def key(self, variable: str) -> str | None:
        """The value of an environment variable; None without a name.

        Raises:
            SettingsError: It is not set.
        """
        value = environment_value(variable) if variable else None
        if variable and value is None:
            raise self.error(f"{variable} is not set")
        return value


@dataclass(frozen=True, slots=True)
class Sample:
    """A labelled answer. prompt: its text, by which answers to one prompt are kept together in cross-validation."""

    answer: JudgedAnswer
    good: bool
    prompt: str


class ScorerExtension(ScorerOptions):
    """The options of a scorer, and how it is built from them. Importing it must import nothing heavy; building it may."""

    @abstractmethod
    def build(self, site: ScorerSite) -> Scorer:
        """The scorer, not started.

        Raises:
            SettingsError: Something that the options name is missing or unusable.
        """

    def backlog(self, site: ScorerSite) -> Backlog | None:
        """Its queue; None if it answers at once."""
        return None

    def reading_tiers(self, site: ScorerSite) -> tuple[str, ...]:
        """Tiers whose models read prompt and answer for a score: those of its parts, unless it asks one itself."""
        return tuple(dict.fromkeys(tier for part in self.parts() for tier in site.others[part].info.tiers))

    def calibration_file(self, site: ScorerSite) -> Path | None:
        """The file of its calibration; None for scores as they are."""
        return site.settings.resolve(site.scorer.calibration) if site.scorer.calibration else None

    async def registered(self, site: ScorerSite, stack: AsyncExitStack) -> NamedScorer:
        """The scorer, started, as the judge asks it. stack: closes it.

        Raises:
            SettingsError: It cannot be started.
        """
        from penstock.judge_service.calibration.isotonic import Calibration

        file = self.calibration_file(site)
        calibration = site.read(Calibration, file) if file is not None else None
        return RegisteredScorer(self.info(site), await self.started(site, stack), calibration, self.backlog(site))

    def info(self, site: ScorerSite) -> ScorerInfo:
        """What the judge lists of it."""
        used = [scorer_of(site.mesh, each) for each in asked_scorers(site.mesh, site.scorer)]
        return ScorerInfo(
            site.scorer.name,
            site.scorer.kind,
            is_calibrated(site.mesh, site.scorer, site.settings),
            any(options.needs_logprobs for options in used),
            any(options.needs_reference() for options in used),
            self.reading_tiers(site),
        )

    async def started(self, site: ScorerSite, stack: AsyncExitStack) -> Scorer:
        """The scorer, started. stack: closes it.

        Raises:
            SettingsError: It cannot be started.
        """
        scorer = self.build(site)
        try:
            await scorer.start()
        except (OSError, ValueError) as error:
            raise site.error(str(error)) from error
        stack.push_async_callback(scorer.close)
        return scorer

    def patient(self) -> Self:
        """The scorer with time to answer a batch of a calibration."""
        return self

    def fitted_to(self, site: ScorerSite) -> tuple[str, ...]:
        """The scorers whose raw scores `fit` takes: itself, or those that it combines.

        Raises:
            SettingsError: It has nothing to fit.
        """
        return (site.scorer.name,)

    def fit(self, scores: Seq[Seq[RawScore]], samples: Seq[Sample]) -> Fitted:
        """What its calibration file should hold. scores: of each sample, for each of `fitted_to`.

        Raises:
            CalibrationError: The samples do not suffice.
        """
        from penstock.judge_service.calibration.isotonic import fit

        own, good = scores[0], [sample.good for sample in samples]
        return fit(
            [score.raw for score in own], good, [score.score for score in own], [sample.prompt for sample in samples]
        )


class TimedScorer(ScorerExtension):
    """A scorer that answers one by one, each within a time."""

    timeout_s: float | None = Field(default=None, gt=0)
    """Limit on the time of one answer. Default: four fifths of the router's judge_timeout_s, which it must not exceed; of a
    scorer that asks a tier, as long as the router waits."""
    concurrency: int = Field(default=8, ge=1)
    """Answers that are scored at once."""

    def problems(self, scorer: MeshScorer, mesh: MeshFile) -> Iterator[FieldProblem]:
        if self.timeout_s is not None and self.timeout_s > mesh.router.judge_timeout_s:
            yield FieldProblem(
                "timeout_s",
                f"{self.timeout_s:g} s, but router.judge_timeout_s is {mesh.router.judge_timeout_s:g} s: "
                "routers would give up before the scorer can answer",
            )

    def backlog(self, site: ScorerSite) -> Backlog | None:
        return Backlog(site.mesh.judge.max_queued, self.concurrency)

    def limit_s(self, site: ScorerSite) -> float:
        """The limit on the time of one answer."""
        return self.timeout_s or SHARE_OF_TIMEOUT * site.mesh.router.judge_timeout_s

    def patient(self) -> Self:
        return self.model_copy(update={"timeout_s": max(self.timeout_s or 0.0, ANSWER_S)})
