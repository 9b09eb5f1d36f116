"""What a worker publishes of its drafts arrives at who watches the mesh."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from penstock import Drafting as ShownDrafting
from penstock.client.messages.mesh import status_from_proto
from penstock.proto.router.v1 import router_pb2 as pb
from router_service.routing.instance_pool import InstancePool
from router_service.status import MeshStatus
from services.domain import InstanceRecord, Load, MeshView, ModelCard, Role
from services.domain.instances import Drafting
from services.state import codec

CARD = ModelCard("large", "m", "d", "torch", 10_000, 1000, 16, 8)


@pytest.mark.parametrize(
    ("drafting", "shown"),
    [
        (None, None),
        (Drafting(), ShownDrafting()),
        (Drafting(("small", "medium"), 5, 0.75), ShownDrafting(("small", "medium"), 5, 0.75)),
    ],
)
async def test_chain_window_and_acceptance_are_in_the_status(
    drafting: Drafting | None, shown: ShownDrafting | None
) -> None:
    """Through the registry's JSON and the router's message to the SDK."""
    load = Load((10,), (), 900, 1.0, drafting=drafting)
    published = InstanceRecord("w", Role.WORKER, "h:1", 1.0, 1, 9.0, model=CARD, load=load)
    record = replace(published, load=codec.load_from_json(codec.load_to_json(load)))
    view, now = MeshView(), asyncio.get_running_loop().time()
    view.connect([record], None, now)
    unused: Any = None
    status = MeshStatus("router", InstancePool(view, ejection_s=60.0), unused, unused, unused, unused)
    message = pb.MeshStatus(instances=[status._instance([record], now)])
    (instance,) = status_from_proto(message).instances
    assert instance.drafting == shown
