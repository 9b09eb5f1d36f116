"""Placement in a large tier: a sample of it is compared, and the result is as good as of the whole."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from penstock.router_service.routing.instance_pool import SAMPLE_OF_STAGE, STAGES_COMPARED, InstancePool
from penstock.router_service.routing.placement import Placed, PlacementCandidate, place
from penstock.services.domain.instances import InstanceRecord, Load, ModelCard, Role
from penstock.services.domain.mesh_view import MeshView
from penstock.types.mesh_status import StagePlace

CARD = ModelCard("small", "m", "d", "sim", 10_000, 1000, 16, 8)
INSTANCES = 400
MOST = STAGES_COMPARED * SAMPLE_OF_STAGE


def worker(i: int, pending: int = 0, place: StagePlace | None = None, running: int = 0) -> InstanceRecord:
    load = Load((10,) * running, (), 900, 1.0, pending_tokens=pending, prompt_tokens_per_s=1e4)
    return InstanceRecord(f"w{i:03}", Role.WORKER, f"h:{i}", 1.0, 1, 9.0, model=CARD, load=load, place=place)


def pool_of(*records: InstanceRecord) -> InstancePool:
    view = MeshView()
    view.connect(records, None, asyncio.get_running_loop().time())
    return InstancePool(view, ejection_s=60.0)


def where(pool: InstancePool, request_id: str, tokens: int = 8, prefix_holder: str = "") -> str:
    found = pool.place("small", request_id, tokens, prefix_holder=prefix_holder)
    assert isinstance(found, Placed)
    return found.record.instance_id


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many candidates each choice compared."""
    import penstock.router_service.routing.instance_pool as module

    counts = list[int]()

    def counted(candidates: list[PlacementCandidate], **options: object) -> object:
        counts.append(len(candidates))
        return place(candidates, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "place", counted)
    return counts


async def test_requests_spread_over_the_whole_tier_and_each_compares_a_sample(compared: list[int]) -> None:
    pool = pool_of(*(worker(i) for i in range(INSTANCES)))
    counts: Counter[str] = Counter()
    for i in range(2 * INSTANCES):
        counts[where(pool, f"request {i}")] += 1
    assert max(compared) <= MOST
    assert len(counts) > 0.7 * INSTANCES
    assert max(counts.values()) < 12


async def test_the_sample_is_of_the_stage_that_covers_the_length_and_of_the_next(compared: list[int]) -> None:
    stages = [StagePlace(s, b, t) for s, (b, t) in enumerate(((0, 100), (100, 1000), (1000, 9000)))]
    records = [worker(i, place=stages[i % 3]) for i in range(INSTANCES)]
    records[7] = worker(7, place=StagePlace(1, 100, 1500))
    pool = pool_of(*records)
    for i in range(50):
        for tokens, stage in ((8, 0), (500, 1), (5000, 2), (50_000, 2)):
            assert int(where(pool, f"r{i}", tokens)[1:]) % 3 == stage
    assert max(compared) <= MOST
    busy = [worker(i, 90_000 if i % 3 == 0 else 0, stages[i % 3]) for i in range(INSTANCES)]
    assert int(where(pool_of(*busy), "r")[1:]) % 3 == 1, "it would wait nine seconds"
    busy = [worker(i, 90_000 if i % 3 == 1 else 0, stages[i % 3]) for i in range(INSTANCES)]
    assert int(where(pool_of(*busy), "r", 100)[1:]) % 3 == 2, "the first stage ends before this length"


@pytest.mark.parametrize("idle", [0, SAMPLE_OF_STAGE - 1, SAMPLE_OF_STAGE, MOST - 1])
async def test_all_instances_of_a_tier_that_is_not_large_are_compared(compared: list[int], idle: int) -> None:
    pool = pool_of(*(worker(i, running=0 if i == idle else 1) for i in range(MOST)))
    assert {where(pool, f"r{i}") for i in range(5)} == {f"w{idle:03}"}
    assert compared == [MOST] * 5


async def test_the_prefix_holder_is_always_in_the_sample() -> None:
    pool = pool_of(*(worker(i) for i in range(INSTANCES)))
    assert all(where(pool, f"r{i}", 4000, prefix_holder="w123") == "w123" for i in range(20))
    assert where(pool, "r", 4000, prefix_holder="gone") != "gone"


async def test_a_sample_without_room_is_not_the_end(compared: list[int]) -> None:
    """The last free instance of a tier is found, and so is a change of who takes requests."""
    loop = asyncio.get_running_loop()
    pool = pool_of(*(worker(i, running=0 if i == 399 else CARD.max_requests) for i in range(INSTANCES)))
    assert {where(pool, f"r{i}") for i in range(20)} == {"w399"}
    assert max(compared) == INSTANCES
    pool.view.hear(replace(worker(399), sequence=2, draining=True), loop.time())
    assert not isinstance(pool.place("small", "r", 8), Placed)
    pool.view.hear(replace(worker(5), sequence=2), loop.time())
    assert where(pool, "r") == "w005"
