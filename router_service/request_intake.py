"""What both APIs need to take a request in, and what they do alike."""

import asyncio
from dataclasses import dataclass

from penstock.router_service.answer_batching import AnswerBatching
from penstock.router_service.generation.in_flight_requests import InFlightRequests
from penstock.router_service.generation.request_driver import RequestDriver
from penstock.router_service.tenancy.tenancy import Tenancy
from penstock.services.domain.mesh_view import MeshView
from penstock.services.domain.plans import CASCADE_MODEL
from penstock.services.domain.slo.promises import Promise
from penstock.services.mesh_schema.router import MeshRouter
from penstock.services.mesh_schema.slo import MeshSlo
from penstock.types.mesh_status import ServedModel
from penstock.types.slo import Slo


@dataclass(frozen=True, slots=True)
class RequestIntake:
    """in_flight: what a drain waits for. limits, slo: of the mesh file."""

    driver: RequestDriver
    tenancy: Tenancy
    view: MeshView
    in_flight: InFlightRequests
    batching: AnswerBatching
    limits: MeshRouter
    slo: MeshSlo

    def models(self) -> list[ServedModel]:
        """The cascade and its tiers by the current plan, those that the caller's tenant may use; none before there is a plan.

        Context 0: no worker serves it now. The cascade's context is the least of its tiers': longer prompts go to those that
        take them, past the others.
        """
        view, plan = self.view, self.view.plan
        if plan is None:
            return []

        def context_tokens(tier: str) -> int:
            workers = view.workers(tier) or view.expired_workers(tier)  # those that would be tried
            return min((worker.model.max_context_tokens for worker in workers if worker.model is not None), default=0)

        tiers = [ServedModel(tier.name, tier.model, False, context_tokens(tier.name)) for tier in plan.tiers]
        served = [tier.max_context_tokens for tier in tiers if tier.max_context_tokens]
        models = [ServedModel(CASCADE_MODEL, "", True, min(served, default=0)), *tiers]
        return [model for model in models if self.tenancy.allows_model(model.id)]

    def promise(self, objectives: Slo | None) -> Promise | None:
        """What a request with these objectives is promised from now on.

        Raises:
            InvalidRequest: They name an unknown class.
        """
        if objectives is None:
            return None
        return Promise.received(self.slo.resolved(objectives), asyncio.get_running_loop().time())
