"""What both APIs need to take a request in, and what they do alike."""

import asyncio
from dataclasses import dataclass

from penstock.router_service.answer_batching import AnswerBatching
from penstock.router_service.domain.models import models_of
from penstock.router_service.generation.in_flight_requests import InFlightRequests
from penstock.router_service.generation.request_driver import RequestDriver
from penstock.router_service.tenancy.tenancy import Tenancy
from penstock.services.domain.mesh_view import MeshView
from penstock.services.domain.slo.promises import Promise
from penstock.services.mesh_schema import MeshRouter, MeshSlo
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
        """Those that the caller's tenant may use."""
        return [model for model in models_of(self.view) if self.tenancy.allows_model(model.id)]

    def promise(self, objectives: Slo | None) -> Promise | None:
        """What a request with these objectives is promised from now on.

        Raises:
            InvalidRequest: They name an unknown class.
        """
        if objectives is None:
            return None
        return Promise.received(self.slo.resolved(objectives), asyncio.get_running_loop().time())
