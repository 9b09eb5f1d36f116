"""Requests that wait for a place: who is woken, and when; in a large tier a sample of its instances is compared."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from penstock.router_service.routing.instance_pool import SAMPLE_OF_STAGE, STAGES_COMPARED, InstancePool
from penstock.router_service.routing.place_queue import PlaceQueue
from penstock.router_service.routing.placement import NotPlaced, Placed, PlacementCandidate, place
from penstock.services.domain.dispatch import REQUEST_TOKENS, work_tokens
from penstock.services.domain.instances import InstanceRecord, Load, ModelCard, Role
from penstock.services.domain.mesh_view import MeshView
from penstock.types.mesh_status import StagePlace

SOON = 0.01
NEVER = 1e9
CARD = ModelCard("small", "m", "d", "torch", 100, 10, 16, 2)


@dataclass
class Line:
    """A queue whose rooms the test sets, and who has been woken, in order."""

    rooms: dict[str, int | None] = field(default_factory=dict)
    pause_s: float = NEVER
    woken: list[str] = field(default_factory=list)
    tasks: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queue = PlaceQueue(lambda tier: self.rooms.get(tier, 0), lambda: self.pause_s)

    async def enter(self, name: str, tier: str = "small", number: int | None = None, until_s: float = NEVER) -> None:
        number = self.queue.number() if number is None else number

        async def wait() -> None:
            await self.queue.wait(tier, number, until_s)
            self.woken.append(name)

        self.tasks[name] = asyncio.create_task(wait())
        await asyncio.sleep(0)

    async def wake(self) -> list[str]:
        """Who is woken by a change."""
        self.woken.clear()
        self.queue.wake()
        for _ in range(5):
            await asyncio.sleep(0)
        return [*self.woken]


@asynccontextmanager
async def line() -> AsyncIterator[Line]:
    made = Line()
    yield made
    for task in made.tasks.values():
        task.cancel()
    await asyncio.gather(*made.tasks.values(), return_exceptions=True)


async def test_as_many_are_woken_as_there_is_room_for_in_order_of_arrival() -> None:
    async with line() as made:
        for name in "abcde":
            await made.enter(name)
        assert await made.wake() == []
        made.rooms["small"] = 2
        assert await made.wake() == ["a", "b"]
        assert await made.wake() == ["c", "d"]


async def test_who_finds_nothing_keeps_its_turn() -> None:
    async with line() as made:
        first = made.queue.number()
        await made.enter("later")
        await made.enter("first", number=first)
        made.rooms["small"] = 1
        assert await made.wake() == ["first"]


async def test_the_tiers_do_not_wake_each_other() -> None:
    async with line() as made:
        await made.enter("s", "small")
        await made.enter("l", "large")
        made.rooms["large"] = 9
        assert await made.wake() == ["l"]


async def test_all_are_woken_once_when_nobody_is_left_to_try() -> None:
    """Each decides for itself then whether to give up."""
    async with line() as made:
        for name in "abc":
            await made.enter(name)
        assert made.queue.deserted() == ()
        made.rooms["small"] = None
        assert made.queue.deserted() == ("small",)
        assert await made.wake() == ["a", "b", "c"]
        assert made.queue.deserted() == ()
        await made.enter("d")
        assert await made.wake() == []
        made.rooms["small"] = 1
        assert await made.wake() == ["d"]


async def test_the_turn_of_one_that_leaves_goes_to_the_next() -> None:
    async with line() as made:
        for name in "abc":
            await made.enter(name)
        made.rooms["small"] = 1
        made.queue.wake()
        made.tasks["a"].cancel()  # woken, and gone before it could take the place
        for _ in range(5):
            await asyncio.sleep(0)
        assert made.woken == ["b"]
        made.tasks["c"].cancel()
        assert await made.wake() == []


async def test_nobody_waits_longer_than_asked_for() -> None:
    async with line() as made, asyncio.timeout(60):
        await made.enter("a", until_s=asyncio.get_running_loop().time() + SOON)
        await made.tasks["a"]


async def test_a_pause_that_ends_wakes_without_any_news() -> None:
    """Also one that begins after the wait and ends before a longer one that the wait knew of."""
    async with line() as made, asyncio.timeout(60):
        await made.enter("a")
        made.rooms["small"], made.pause_s = 2, SOON
        await made.enter("b")
        await asyncio.gather(made.tasks["a"], made.tasks["b"])


def worker(name: str, running: int, sequence: int = 1) -> InstanceRecord:
    load = Load((5,) * running, (), 9, 1.0)
    return InstanceRecord(name, Role.WORKER, f"{name}:1", 1.0, sequence, 3.0, model=CARD, load=load)


def pool_of(*records: InstanceRecord) -> InstancePool:
    view = MeshView()
    view.connect(records, None, asyncio.get_running_loop().time())
    return InstancePool(view, ejection_s=60.0)


def where(pool: InstancePool, request_id: str = "r", tokens: int = 8, prefix_holder: str = "") -> str:
    found = pool.place("small", request_id, tokens, prefix_holder=prefix_holder)
    assert isinstance(found, Placed)
    return found.record.instance_id


async def test_news_of_a_worker_wakes_only_as_many_as_it_has_room_for() -> None:
    """Ten wait for a full tier; a worker says that one of its requests has ended: one is woken, and placed there."""
    pool = pool_of(worker("a", 2), worker("b", 2))
    tries, placed = 0, list[str]()

    async def request(i: int) -> None:
        nonlocal tries
        number = pool.queue.number()
        while True:
            tries += 1
            found = pool.place("small", f"r{i}", 8)
            if isinstance(found, Placed):
                placed.append(f"r{i}")
                with pool.sending(found.record.instance_id):
                    await asyncio.Event().wait()
            await pool.queue.wait("small", number, NEVER)

    tasks = [asyncio.create_task(request(i)) for i in range(10)]
    for _ in range(3):
        await asyncio.sleep(0)
    assert (tries, placed) == (10, [])
    pool.view.hear(worker("b", 1, sequence=2), asyncio.get_running_loop().time())
    pool.view_changed()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (tries, placed) == (11, ["r0"])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_pool_follows_every_change_of_the_view() -> None:
    """Whatever the candidates were made of before: a new record, a lease that ends, a lease that begins again, a goodbye."""
    view, loop = MeshView(keep_expired={Role.WORKER}), asyncio.get_running_loop()
    pool = InstancePool(view, ejection_s=60.0)

    def chosen() -> str | None:
        found = pool.place("small", "r", 8)
        return found.record.instance_id if isinstance(found, Placed) else None

    assert pool.place("small", "r", 8) == NotPlaced(full=False)
    view.connect([worker("a", 1), worker("b", 0)], None, loop.time())
    assert chosen() == "b"
    view.hear(worker("b", 2, sequence=2), loop.time())
    assert chosen() == "a"
    view.hear(replace(worker("a", 1, sequence=2), draining=True), loop.time())
    assert chosen() is None
    view.hear(worker("c", 0), loop.time())
    assert chosen() == "c"
    view.alive(loop.time() + 4)
    assert set(view.expire()) == {"a", "b", "c"}
    assert chosen() == "c", "the last resort"
    view.hear(worker("b", 1, sequence=3), loop.time())
    assert chosen() == "b"
    view.forget("b")
    view.forget("c")
    assert chosen() is None
    assert pool.is_leaving("a")


@pytest.mark.parametrize("after", [False, True])
async def test_what_was_sent_after_a_record_came_counts_on_top_of_it(after: bool) -> None:
    pool = pool_of(worker("a", 0), worker("b", 1))
    with pool.sending("a"), pool.sending("a"):
        if not after:
            pool.view.hear(worker("a", 0, sequence=2), asyncio.get_running_loop().time() + 1)
        assert where(pool) == ("b" if after else "a")
    assert where(pool) == "a"


async def test_a_request_that_has_moved_counts_at_its_target_only() -> None:
    """And nowhere after its end."""
    pool = pool_of(worker("a", 1), worker("b", 1))  # one place left at each
    with pool.sending("a", 50) as sent:
        assert where(pool) == "b"
        sent.move("b")
        assert where(pool) == "a"
    for name, other in (("a", "b"), ("b", "a")):
        with pool.sending(name):
            assert where(pool) == other


SIM_CARD = ModelCard("small", "m", "d", "sim", 10_000, 1000, 16, 8)
INSTANCES = 400
MOST = STAGES_COMPARED * SAMPLE_OF_STAGE


def numbered(
    i: int, pending: int = 0, place: StagePlace | None = None, running: int = 0, per_s: float = 1e4
) -> InstanceRecord:
    load = Load((10,) * running, (), 900, 1.0, pending_tokens=pending, prompt_tokens_per_s=per_s)
    return InstanceRecord(f"w{i:03}", Role.WORKER, f"h:{i}", 1.0, 1, 9.0, model=SIM_CARD, load=load, place=place)


async def test_the_delay_of_a_tier_is_that_of_its_least_busy_instance() -> None:
    """With what was sent there since its record; without instances that failed."""
    pool = pool_of(numbered(1, 500, running=4), numbered(2, 100, running=2))
    assert pool.delay_s("small", REQUEST_TOKENS) == work_tokens(100, 2, 20) / 1e4
    assert pool.delay_s("small", 0) == 0.01
    with pool.sending("w002", 100):
        assert pool.delay_s("small", 0) == 0.02
    with pool.sending("w002", 5000):
        assert pool.delay_s("small", REQUEST_TOKENS) == work_tokens(500, 4, 40) / 1e4
    pool.eject("w002")
    assert pool.delay_s("small", 0) == 0.05
    assert pool.delay_s("medium", REQUEST_TOKENS) == 0.0, "it has no instances"


async def test_an_idle_instance_and_one_of_unknown_throughput_delay_nothing() -> None:
    assert pool_of(numbered(1, 500, running=4), numbered(2)).delay_s("small", 1_000_000) == 0.0
    assert pool_of(numbered(1, 500, running=4, per_s=0.0)).delay_s("small", 1_000_000) == 0.0


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
    pool = pool_of(*(numbered(i) for i in range(INSTANCES)))
    counts: Counter[str] = Counter()
    for i in range(2 * INSTANCES):
        counts[where(pool, f"request {i}")] += 1
    assert max(compared) <= MOST
    assert len(counts) > 0.7 * INSTANCES
    assert max(counts.values()) < 12


async def test_the_sample_is_of_the_stage_that_covers_the_length_and_of_the_next(compared: list[int]) -> None:
    stages = [StagePlace(s, b, t) for s, (b, t) in enumerate(((0, 100), (100, 1000), (1000, 9000)))]
    records = [numbered(i, place=stages[i % 3]) for i in range(INSTANCES)]
    records[7] = numbered(7, place=StagePlace(1, 100, 1500))
    pool = pool_of(*records)
    for i in range(50):
        for tokens, stage in ((8, 0), (500, 1), (5000, 2), (50_000, 2)):
            assert int(where(pool, f"r{i}", tokens)[1:]) % 3 == stage
    assert max(compared) <= MOST
    busy = [numbered(i, 90_000 if i % 3 == 0 else 0, stages[i % 3]) for i in range(INSTANCES)]
    assert int(where(pool_of(*busy), "r")[1:]) % 3 == 1, "it would wait nine seconds"
    busy = [numbered(i, 90_000 if i % 3 == 1 else 0, stages[i % 3]) for i in range(INSTANCES)]
    assert int(where(pool_of(*busy), "r", 100)[1:]) % 3 == 2, "the first stage ends before this length"


async def test_a_worker_that_joins_a_large_tier_gets_requests(compared: list[int]) -> None:
    """The samples are of the workers that there are now."""
    pool, loop = pool_of(*(numbered(i, running=3) for i in range(INSTANCES))), asyncio.get_running_loop()
    first = {where(pool, f"r{i}") for i in range(INSTANCES)}
    pool.view.hear(numbered(INSTANCES), loop.time())
    assert f"w{INSTANCES:03}" not in first
    assert f"w{INSTANCES:03}" in {where(pool, f"r{i}") for i in range(INSTANCES)}
    assert max(compared) <= MOST + 1


@pytest.mark.parametrize("idle", [0, SAMPLE_OF_STAGE - 1, SAMPLE_OF_STAGE, MOST - 1])
async def test_all_instances_of_a_tier_that_is_not_large_are_compared(compared: list[int], idle: int) -> None:
    pool = pool_of(*(numbered(i, running=0 if i == idle else 1) for i in range(MOST)))
    assert {where(pool, f"r{i}") for i in range(5)} == {f"w{idle:03}"}
    assert compared == [MOST] * 5


async def test_the_prefix_holder_is_always_in_the_sample() -> None:
    pool = pool_of(*(numbered(i) for i in range(INSTANCES)))
    assert all(where(pool, f"r{i}", 4000, prefix_holder="w123") == "w123" for i in range(20))
    assert where(pool, "r", 4000, prefix_holder="gone") != "gone"


async def test_a_sample_without_room_is_not_the_end(compared: list[int]) -> None:
    """The last free instance of a tier is found, and so is a change of who takes requests."""
    loop = asyncio.get_running_loop()
    pool = pool_of(*(numbered(i, running=0 if i == 399 else SIM_CARD.max_requests) for i in range(INSTANCES)))
    assert {where(pool, f"r{i}") for i in range(20)} == {"w399"}
    assert max(compared) == INSTANCES
    pool.view.hear(replace(numbered(399), sequence=2, draining=True), loop.time())
    assert not isinstance(pool.place("small", "r", 8), Placed)
    pool.view.hear(replace(numbered(5), sequence=2), loop.time())
    assert where(pool, "r") == "w005"
