"""Models that read prompt and answer in one pass as an entry point: `judge-model`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.judge_service.scoring.backlog import Backlog
from penstock.judge_service.scoring.extension import ScorerExtension, ScorerSite
from penstock.services.mesh_schema.judge import MeshScorer
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.types.problems import FieldProblem

if TYPE_CHECKING:
    from penstock.judge_service.scorers.judge_model.scorer import JudgeModelScorer


class JudgeModel(ScorerExtension):
    """`judge-model`: a model that reads prompt and answer in one pass. Without `calibration`, calibration.json of the model's
    folder is used."""

    judge_fields = frozenset({"device", "max_batch", "max_batch_tokens"})

    model: str = ""
    """A folder in Hugging Face format, or an id at the hub."""

    def models(self) -> Iterator[tuple[str, str]]:
        yield "model", self.model

    def problems(self, scorer: MeshScorer, mesh: MeshFile) -> Iterator[FieldProblem]:
        if not self.model:
            yield FieldProblem("model", "missing: a judge-model scorer needs a model")

    def backlog(self, site: ScorerSite) -> Backlog | None:
        return Backlog(site.mesh.judge.max_queued, site.mesh.judge.max_batch)

    def calibration_file(self, site: ScorerSite) -> Path | None:
        of_model = site.settings.resolve(self.model) / "calibration.json"
        return super().calibration_file(site) or (of_model if of_model.exists() else None)

    def build(self, site: ScorerSite) -> "JudgeModelScorer":
        folder = site.folder(self.model)  # checked before torch, which takes seconds to import
        from penstock.judge_service.scorers.judge_model.scorer import JudgeModelScorer

        judge = site.mesh.judge
        batch, tokens = judge.max_batch, judge.max_batch_tokens
        return JudgeModelScorer(folder, max_batch=batch, max_tokens=tokens, threads=judge.threads, device=judge.device)
