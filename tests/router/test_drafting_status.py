"""What a worker publishes of its drafts arrives at who watches the mesh."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from penstock.router_service.routing.instance_pool import InstancePool
from penstock.router_service.status import StatusReader
from penstock.services.domain.instances import InstanceRecord, Load, ModelCard, Role
from penstock.services.domain.mesh_view import MeshView
from penstock.services.state import codec
from penstock.types.mesh_status import Drafting

CARD = ModelCard("large", "m", "d", "torch", 10_000, 1000, 16, 8)


@pytest.mark.parametrize("drafting", [None, Drafting(), Drafting(("small", "medium"), 5, 0.75)])
async def test_chain_window_and_acceptance_are_in_the_status(drafting: Drafting | None) -> None:
    """Through the registry's JSON."""
    load = Load((10,), (), 900, 1.0, drafting=drafting)
    published = InstanceRecord("w", Role.WORKER, "h:1", 1.0, 1, 9.0, model=CARD, load=load)
    record = replace(published, load=codec.load_from_json(codec.load_to_json(load)))
    view, now = MeshView(), asyncio.get_running_loop().time()
    view.connect([record], None, now)
    unused: Any = None
    status = StatusReader("router", InstancePool(view, ejection_s=60.0), unused, unused, unused, unused, unused)
    assert status._instance([record], now).drafting == drafting
