"""A whole mesh file."""

import itertools
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, field_validator, model_validator

from penstock.services.domain.instances import DEFAULT_MESH
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_schema.access import MeshAccess, MeshTls
from penstock.services.mesh_schema.common import FROZEN
from penstock.services.mesh_schema.judge import MeshJudge, default_scorers
from penstock.services.mesh_schema.planner import MeshPlanner
from penstock.services.mesh_schema.router import MeshRouter, share_of
from penstock.services.mesh_schema.slo import MeshSlo
from penstock.services.mesh_schema.stages import MeshStages
from penstock.services.mesh_schema.tiers import MeshTier
from penstock.types.plans import JudgeUnavailable, Plan, TierPlan
from penstock.types.rules import rules_of


class MeshFile(BaseModel):
    """A mesh file describes the processes of a mesh. `penstock up` and docker compose both use it."""

    model_config = FROZEN

    name: str = Field(default=DEFAULT_MESH, min_length=1, max_length=128)
    """Name of the mesh: the prefix of its keys and users in Redis, so that several meshes can share one Redis."""
    redis_url: str = ""
    """URL of a Redis, or of Sentinels. Empty: REDIS_URL from the environment; without it `penstock up` starts a Redis."""
    tiers: tuple[MeshTier, ...]
    """The tiers, from the cheapest to the most expensive."""
    judge: MeshJudge = MeshJudge()
    """The judge: see below. Default: answers are scored by their confidence; a mesh of one tier, whose answers are always
    accepted, has no judge process."""
    router: MeshRouter = MeshRouter()
    """The routers: see below."""
    planner: MeshPlanner = MeshPlanner()
    """The planner: see below."""
    stages: MeshStages = MeshStages()
    """Length stages: see below."""
    slo: MeshSlo = MeshSlo()
    """Latency objectives of requests: see below."""
    access: MeshAccess = MeshAccess()
    """API keys and tenants: see below."""
    tls: MeshTls = MeshTls()
    """Certificates: see below."""

    @field_validator("name")
    @classmethod
    def _name_of_users(cls, name: str) -> str:
        """Of keys, which end at the colon, and of users in an ACL file."""
        if re.search(r"""[\s:"'\\]|[^ -~]""", name):
            raise ValueError("must have no space, colon, quote, backslash or character beyond ASCII")
        return name

    @model_validator(mode="before")
    @classmethod
    def _judge_by_the_tiers(cls, data: Any) -> Any:
        """The judge of a file that says nothing of it: none for one tier; for endpoints, one that needs no log-probabilities.

        A calibration is of answers with log-probabilities, so with one they are needed.
        """
        if not isinstance(data, dict) or not isinstance(tiers := data.get("tiers"), list | tuple):
            return data
        if len(tiers) == 1 and "judge" not in data:
            return data | {"judge": {"replicas": 0}}
        judge, of_tiers = data.get("judge", {}), [tier for tier in tiers if isinstance(tier, dict)]
        remote = any(tier.get("engine") == "openai" for tier in of_tiers[:-1])
        if remote and isinstance(judge, dict) and not judge.keys() & {"scorers", "calibration"}:
            scorers = default_scorers(grader=str(of_tiers[-1].get("name", "")))
            return data | {"judge": judge | {"scorers": scorers}}
        return data

    @model_validator(mode="after")
    def _tenants_name_known_classes(self) -> "MeshFile":
        for at, tenant in enumerate(self.access.tenants):
            for name in tenant.slo_classes:
                if name not in self.slo.classes:
                    raise ValueError(f"access.tenants.{at}.slo_classes: no class '{name}' in slo.classes")
        return self

    @model_validator(mode="after")
    def _somebody_consents_to_samples(self) -> "MeshFile":
        tenants = self.access.tenants
        if self.router.sample_prompts.share and tenants and not any(tenant.sample_prompts for tenant in tenants):
            raise ValueError("router.sample_prompts.share: no tenant of access.tenants has sample_prompts: true")
        return self

    def router_share(self, index: int, count: int) -> "MeshFile":
        """This file as one of `count` processes of a router follows it. index: from 0."""
        replan = self.planner.replan
        sampled = replan.model_copy(update={"sample": max(1, share_of(replan.sample, index, count))})
        planner = self.planner.model_copy(update={"replan": sampled})
        return self.model_copy(update={"router": self.router.share(index, count), "planner": planner})

    def plan(self, input_digest: str) -> Plan:
        """The plan that this file describes."""
        served = {tier.name: tier.served_name for tier in self.tiers}
        tiers = tuple(
            TierPlan(
                t.name,
                t.served_name,
                t.threshold,
                t.workers,
                **rules_of(t),
                drafters=tuple(dict.fromkeys(served.get(name) or Path(name).name for name in self.drafters(t))),
            )
            for t in self.tiers
        )
        return Plan(
            revision=0,
            tiers=tiers,
            judge_unavailable=JudgeUnavailable(self.planner.judge_unavailable),
            source="mesh-file",
            input_digest=input_digest,
            **rules_of(self.planner),
        )

    def drafters(self, tier: MeshTier) -> tuple[str, ...]:
        """What drafts for a tier: names of other tiers, folders or ids at the hub."""
        names = tier.speculation.drafters
        if names != "auto":
            return names
        before = itertools.takewhile(lambda other: other.name != tier.name, self.tiers)
        return tuple(other.name for other in before if other.engine == tier.engine and other.model != tier.model)

    def tier(self, name: str) -> MeshTier:
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise SettingsError(
            f"tier: no tier '{name}' in the mesh file, which has {', '.join(t.name for t in self.tiers)}"
        )
