"""Scorers that are combined as an entry point: `combined`."""

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.judge_service.calibration.fitted import Fitted
from penstock.judge_service.scoring.backlog import Backlog
from penstock.judge_service.scoring.extension import Sample, ScorerExtension, ScorerSite
from penstock.judge_service.scoring.interface import RawScore
from penstock.judge_service.scoring.registry import RegisteredScorer
from penstock.services.extensions.scorers import scorer_of
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_schema.judge import MeshScorer
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.types.problems import FieldProblem

if TYPE_CHECKING:
    from penstock.judge_service.scorers.combined.combination import Combination
    from penstock.judge_service.scorers.combined.scorer import CombinedScorer


class Combined(ScorerExtension):
    """`combined`: a logistic model over other scorers. `calibration` is the file with its fitted weights; with
    scorers of the kinds `confidence` and `code` (of the prompt's examples) it can do without, by stated weights."""

    scorers: tuple[str, ...] = ()
    """Names of the scorers that it combines."""

    def parts(self) -> tuple[str, ...]:
        return self.scorers

    def problems(self, scorer: MeshScorer, mesh: MeshFile) -> Iterator[FieldProblem]:
        if len(self.scorers) < 2:
            yield FieldProblem("scorers", "a combined scorer needs at least two")
        if not scorer.calibration and self._stated_weights(mesh) is None:
            yield FieldProblem("calibration", "missing: the file with the fitted weights")
        for part in mesh.judge.scorers:
            with contextlib.suppress(SettingsError):  # of the part, which has problems of its own
                if part.name in self.scorers and not scorer_of(mesh, part).has_raw_scores:
                    yield FieldProblem("scorers", f"'{part.name}' is {part.kind}: it has no raw scores to combine")

    def calibration_file(self, site: ScorerSite) -> Path | None:
        return None  # its file holds weights, and its scores are probabilities

    def build(self, site: ScorerSite) -> "CombinedScorer":
        from penstock.judge_service.scorers.combined.scorer import CombinedScorer

        parts = [part.scorer for part in self._parts(site)]
        return CombinedScorer(parts, self._combination(site))

    def backlog(self, site: ScorerSite) -> Backlog | None:
        at_once = [part.backlog.at_once for part in self._parts(site) if part.backlog is not None]
        return Backlog(site.mesh.judge.max_queued, min(at_once)) if at_once else None

    def fitted_to(self, site: ScorerSite) -> tuple[str, ...]:
        return self.scorers

    def fit(self, scores: Seq[Seq[RawScore]], samples: Seq[Sample]) -> Fitted:
        from penstock.judge_service.scorers.combined.combination import fit_combination

        raws = [[score.raw for score in of_sample] for of_sample in zip(*scores, strict=True)]
        good, tiers = [sample.good for sample in samples], [sample.answer.tier for sample in samples]
        return fit_combination(self.scorers, raws, good, tiers, [sample.prompt for sample in samples])

    def _parts(self, site: ScorerSite) -> list[RegisteredScorer]:
        parts = [site.others[name] for name in self.scorers]
        return [part for part in parts if isinstance(part, RegisteredScorer)]

    def _stated_weights(self, mesh: MeshFile) -> list[tuple[float, float]] | None:
        """Those of its parts, if all have some."""
        parts = {part.name: part for part in mesh.judge.scorers}
        weights = list[tuple[float, float]]()
        for name in self.scorers:
            with contextlib.suppress(SettingsError, KeyError):  # found by other checks
                if (weight := scorer_of(mesh, parts[name]).stated_weight()) is not None:
                    weights.append(weight)
        return weights if len(weights) == len(self.scorers) else None

    def _combination(self, site: ScorerSite) -> "Combination":
        """The fitted weights, or the stated ones.

        Raises:
            SettingsError: The file is bad, or was fitted to other scorers.
        """
        from penstock.judge_service.scorers.combined.combination import Combination, stated_combination

        if not site.scorer.calibration and (weights := self._stated_weights(site.mesh)) is not None:
            return stated_combination(self.scorers, weights)
        path = site.settings.resolve(site.scorer.calibration)
        combination = site.read(Combination, path)
        if combination.scorers != self.scorers:
            raise site.error(f"{path} was fitted to {', '.join(combination.scorers)}, not to {', '.join(self.scorers)}")
        return combination
