"""Reward models at SGLang servers as an entry point: `reward`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.judge_service.scoring.extension import ScorerSite, TimedScorer
from penstock.services.mesh_schema.judge import MeshScorer
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.types.problems import FieldProblem

if TYPE_CHECKING:
    from penstock.judge_service.scorers.reward.scorer import RewardScorer


class Reward(TimedScorer):
    """`reward`: a reward model that SGLang serves."""

    key_variable = "api_key_env"

    endpoint: str = ""
    """Base URL of the SGLang server."""
    model: str = ""
    """A folder in Hugging Face format, or an id at the hub, of which only tokenizer and configuration are read."""
    api_key_env: str = ""
    """Name of the environment variable that holds the endpoint's key. Empty: no key."""

    def models(self) -> Iterator[tuple[str, str]]:
        yield "model", self.model

    def problems(self, scorer: MeshScorer, mesh: MeshFile) -> Iterator[FieldProblem]:
        yield from super().problems(scorer, mesh)
        if not (self.endpoint and self.model):
            yield FieldProblem("", "a reward scorer needs endpoint and model")

    def build(self, site: ScorerSite) -> "RewardScorer":
        from penstock.judge_service.scorers.reward.scorer import RewardScorer

        return RewardScorer(
            self.endpoint,
            site.folder(self.model),
            api_key=site.key(self.api_key_env),
            timeout_s=self.limit_s(site),
            concurrency=self.concurrency,
        )
