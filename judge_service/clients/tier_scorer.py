"""Scorers that ask tiers of the mesh."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from pydantic import Field

from penstock.judge_service.scoring.extension import ScorerSite, TimedScorer
from penstock.judge_service.scoring.questions import REPLY_TOKENS
from penstock.services.domain.instances import Role
from penstock.services.mesh_schema.judge import MeshScorer
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.types.problems import FieldProblem

if TYPE_CHECKING:
    from penstock.judge_service.clients.tier_client import TierChat


class TierScorer(TimedScorer):
    """A scorer that asks a tier of the mesh; without `timeout_s`, for as long as routers wait, which know its speed."""

    tier: str = ""
    """The tier that is asked."""
    tier_share: float = Field(default=0.25, gt=0, le=1)
    """Fraction of the tier's max_running that may be used at once, over all judges; each judge may use at least one slot of
    each worker."""

    def problems(self, scorer: MeshScorer, mesh: MeshFile) -> Iterator[FieldProblem]:
        yield from super().problems(scorer, mesh)
        if self.tier and self.tier not in {tier.name for tier in mesh.tiers}:
            yield FieldProblem("tier", f"no tier '{self.tier}'")

    def chat(self, site: ScorerSite, tiers: Seq[str], *, max_tokens: int = REPLY_TOKENS) -> "TierChat":
        """What asks the tiers. max_tokens: of a grade, thoughts included."""
        from penstock.judge_service.clients.tier_client import TierChat
        from penstock.services.access.certificates import CertificateFiles
        from penstock.services.state.keys import Keys

        mesh, folder = site.mesh, site.settings.certificate_folder(site.mesh)
        places = min(mesh.tier(name).max_running for name in tiers)
        return TierChat(
            self.tier,
            site.settings.state_url(mesh),
            Keys(mesh.name),
            self.timeout_s,
            places_per_worker=max(1, round(places * self.tier_share / max(1, mesh.judge.replicas))),
            max_tokens=max_tokens,
            certificates=CertificateFiles.of_role(folder, Role.JUDGE.value) if folder is not None else None,
        )
