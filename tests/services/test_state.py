"""What is kept in Redis, in a real one: leases, subscription, plan revisions, traces."""

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from services.domain import InstanceRecord, Load, MeshView, ModelCard, NotFound, Plan, RevisionConflict, Role, TierPlan
from services.domain.instances import Drafting, SloHeadroom
from services.domain.stages.places import StagePlace
from services.stalls import STALL_S, TICK_S
from services.state import MeshFeed, PlanStore, Registrar, SpanRecord, StateUnavailable, TraceStore, codec, connect
from services.state.connection import connect_blocking
from services.state.keys import Keys, tier_group
from services.state.registry import publish
from services.state.traces import PAGE_SPANS, SPANS_PER_TRACE, write_spans
from services.testing import RedisProcess

CARD = ModelCard("small", "m", "d", "torch", 100, 10, 16, 8)
STOPPED_LEASE_S = 2.5  # of an instance that is heard again after the feed stood still; time for that on a busy machine
PLAN = Plan(0, (TierPlan("small", "m", 50.0, 1), TierPlan("large", "n", None, 2)), scorer="judge-model")


@pytest.fixture
def keys() -> Keys:
    return Keys(f"test-{uuid.uuid4().hex[:8]}")


@pytest.fixture
async def client(redis: RedisProcess) -> AsyncIterator[Redis]:
    made = connect(redis.url)
    yield made
    await made.aclose()


def record(name: str, lease_s: float = 60.0) -> InstanceRecord:
    return InstanceRecord(name, Role.WORKER, "h:1", 1.0, 0, lease_s, model=CARD)


async def until(condition: object) -> None:
    async with asyncio.timeout(60):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


def test_records_and_plans_survive_json() -> None:
    load = Load(
        (1, 2), (3,), 4, 5.5, (1, 1, 3), slo=SloHeadroom(0.25, 1000.0, 64), drafting=Drafting(("s", "m"), 5, 0.75)
    )
    full = dataclasses.replace(record("w"), load=load, draining=True, place=StagePlace(1, 8, 64), http_address="h:2")
    assert codec.record_from_json(codec.record_to_json(full)) == full
    plain = InstanceRecord("j", Role.JUDGE, "h:1", 1.0, 2, 3.0)
    assert codec.record_from_json(codec.record_to_json(plain)) == plain
    assert codec.plan_from_json(codec.plan_to_json(PLAN)) == PLAN
    for broken in (b"{", b"{}", b"[]", b'{"instance_id": 1}'):
        with pytest.raises(ValueError, match=r"."):
            codec.record_from_json(broken)
        with pytest.raises(ValueError, match=r"."):
            codec.plan_from_json(broken)


async def test_an_instance_is_seen_while_it_lives_and_gone_with_a_goodbye(client: Redis, keys: Keys) -> None:
    view = MeshView()
    load = Load((5,), (), 9, 1.0)
    async with MeshFeed(client, keys, view) as feed:
        await feed.synced.wait()
        async with Registrar(client, keys, record("w"), interval_s=0.02, load=lambda: load) as registrar:
            await until(lambda: view.workers("small"))
            load = Load((5, 6), (), 8, 2.0)
            await until(lambda: view.workers("small")[0].load == load)
            registrar.drain()
            await until(lambda: not view.workers("small"))
            assert view.instances()[0].draining
        await until(lambda: not view.instances())
    assert await client.exists(keys.instance("w")) == 0


async def test_a_silent_instance_expires_everywhere(client: Redis, keys: Keys) -> None:
    view, other = MeshView(), MeshView()
    async with MeshFeed(client, keys, view) as feed:
        await feed.synced.wait()
        registrar = Registrar(client, keys, record("w", lease_s=0.6), interval_s=0.05)
        await registrar.__aenter__()
        await until(lambda: view.instances())
        assert registrar._task is not None
        registrar._task.cancel()  # as if the process had been killed: no goodbye
        await until(lambda: not view.instances())
        async with MeshFeed(client, keys, other) as late:
            await late.synced.wait()
            assert other.instances() == []


async def test_a_feed_that_stood_still_gives_instances_a_whole_lease_to_speak_up(
    client: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was stopped for longer than a lease; the store speaks before the instance does."""
    view, looks = MeshView(), [0]
    expire = view.expire

    def counted() -> list[str]:
        looks[0] += 1
        return expire()

    monkeypatch.setattr(view, "expire", counted)
    async with MeshFeed(client, keys, view) as feed:
        await feed.synced.wait()
        async with client.pipeline() as pipe:
            publish(pipe, keys, record("w", lease_s=STOPPED_LEASE_S))
            await pipe.execute()
        await until(lambda: view.instances())
        time.sleep(STOPPED_LEASE_S + TICK_S + STALL_S)  # noqa: ASYNC251 - the loop stands still
        await PlanStore(client, keys).publish(PLAN)
        await until(lambda: view.plan is not None)
        looked = looks[0]
        await until(lambda: looks[0] >= looked + 2)
        assert view.instances()
        await until(lambda: not view.instances())


async def test_who_comes_late_reads_everything(client: Redis, keys: Keys) -> None:
    await PlanStore(client, keys).publish(PLAN)
    async with Registrar(client, keys, record("w"), interval_s=0.05) as registrar:
        await registrar.published.wait()
        view = MeshView()
        async with MeshFeed(client, keys, view) as feed:
            await feed.synced.wait()
            assert [r.instance_id for r in view.instances()] == ["w"]
            assert view.plan is not None
            assert view.plan.tiers == PLAN.tiers


async def test_junk_in_redis_is_ignored(client: Redis, keys: Keys) -> None:
    await client.sadd(keys.instances, "junk", "gone")
    await client.set(keys.instance("junk"), "{not json")
    view = MeshView()
    async with MeshFeed(client, keys, view) as feed:
        await feed.synced.wait()
        await client.publish(keys.instance_events("worker:small"), "nonsense")
        await client.publish(keys.plan_events, "nonsense")
        async with Registrar(client, keys, record("w"), interval_s=0.05):
            await until(lambda: view.instances())


async def test_revisions_are_numbered_without_gaps_whoever_publishes(client: Redis, keys: Keys) -> None:
    store = PlanStore(client, keys)
    assert await store.current() is None
    made = await asyncio.gather(*(store.publish(PLAN) for _ in range(20)))
    assert sorted(plan.revision for plan in made) == list(range(1, 21))
    current = await store.current()
    assert current is not None
    assert current.revision == 20
    assert (await store.get(7)).revision == 7
    with pytest.raises(NotFound):
        await store.get(21)


async def test_publishing_may_depend_on_the_revision(client: Redis, keys: Keys) -> None:
    store = PlanStore(client, keys)
    await store.publish(PLAN, expected=0)
    with pytest.raises(RevisionConflict) as caught:
        await store.publish(PLAN, expected=0)
    assert (caught.value.expected, caught.value.current) == (0, 1)
    results = await asyncio.gather(*(store.publish(PLAN, expected=1) for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(r, Plan) for r in results) == 1


async def test_an_outage_is_one_error(own_redis: RedisProcess, keys: Keys) -> None:
    client = connect(own_redis.url)
    own_redis.stop()
    store = PlanStore(client, keys)
    for call in (store.current(), store.get(1), store.publish(PLAN)):
        with pytest.raises(StateUnavailable):
            await call
    with pytest.raises(StateUnavailable):
        await TraceStore(client, keys).last(1)
    await client.aclose()


async def test_a_feed_of_one_tier_hears_of_no_other(client: Redis, keys: Keys) -> None:
    """Workers follow their own tier: what others publish costs them nothing."""
    other = dataclasses.replace(record("other"), model=dataclasses.replace(CARD, tier="large"))
    views = MeshView(), MeshView()
    async with (
        MeshFeed(client, keys, views[0], group=tier_group("small")) as own,
        MeshFeed(client, keys, views[1]) as everything,
    ):
        await own.synced.wait()
        await everything.synced.wait()
        async with (
            Registrar(client, keys, other, interval_s=0.02),
            Registrar(client, keys, record("w"), interval_s=0.02, place=lambda: StagePlace(0, 0, 9)),
        ):
            await until(lambda: len(views[1].instances()) == 2 and views[0].instances())
            assert [r.instance_id for r in views[0].instances()] == ["w"]
            assert views[0].instances()[0].place == StagePlace(0, 0, 9)
            async with MeshFeed(client, keys, MeshView(), group=tier_group("large")) as late:
                await late.synced.wait()
                assert [r.instance_id for r in late.view.instances()] == ["other"]
        await until(lambda: not views[0].instances() and not views[1].instances())


async def test_the_feed_survives_an_outage(own_redis: RedisProcess, keys: Keys) -> None:
    client, view, changes = connect(own_redis.url), MeshView(), asyncio.Event()
    async with MeshFeed(client, keys, view, on_change=changes.set) as feed:
        await feed.synced.wait()
        async with Registrar(client, keys, record("w", lease_s=5.0), interval_s=0.05):
            await until(lambda: view.instances())
            own_redis.stop()
            await until(lambda: not view.connected)
            assert view.instances()
            own_redis.start()
            await until(lambda: view.connected)
            await until(lambda: view.instances())
    await client.aclose()


async def test_the_last_traces_are_kept_and_no_more(redis: RedisProcess, client: Redis, keys: Keys) -> None:
    blocking = connect_blocking(redis.url)

    def span(trace: int, name: str, parent: str = "") -> SpanRecord:
        return SpanRecord(f"{trace:032x}", f"{name}{trace}", parent, name, "router", float(trace), 0.5)

    keep = 20
    for i in range(100):
        spans = [span(i, "root"), *(span(i, f"child{c}", f"root{i}") for c in range(SPANS_PER_TRACE))]
        write_spans(blocking, keys, spans, keep)
    store = TraceStore(client, keys)
    last = await store.last(3)
    assert [spans[0].trace_id for spans in last] == [f"{i:032x}" for i in (99, 98, 97)]
    assert len(await store.get(f"{99:032x}")) == SPANS_PER_TRACE + 1
    with pytest.raises(NotFound):
        await store.get("f" * 32)
    assert await client.xlen(keys.spans) < keep * SPANS_PER_TRACE + 200
    blocking.close()


async def test_reading_traces_leaves_the_event_loop_to_others(redis: RedisProcess, client: Redis, keys: Keys) -> None:
    """What is kept is read page by page: others run in between, and several readers take turns."""
    count = 10 * PAGE_SPANS + 7
    spans = [SpanRecord(f"{i:032x}", f"s{i}", "", "root", "router", float(i), 0.5) for i in range(count)]
    with connect_blocking(redis.url) as writer:
        write_spans(writer, keys, spans, keep=count)
    store, turns, reading = TraceStore(client, keys), 0, True

    async def other() -> None:
        nonlocal turns
        while reading:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    last, one, another = await asyncio.gather(
        store.last(count), store.get(f"{PAGE_SPANS:032x}"), store.get(f"{count - 1:032x}")
    )
    reading = False
    await beside
    assert [trace[0].span_id for trace in last] == [f"s{i}" for i in reversed(range(count))]
    assert (one, another) == ([spans[PAGE_SPANS]], [spans[count - 1]])
    assert turns > 3 * 10
    assert [trace[0].span_id for trace in await store.last(3)] == [f"s{count - i}" for i in (1, 2, 3)]
    for unknown in (f"{count:032x}", "", "x" * 32, "A" * 32, "*"):
        with pytest.raises(NotFound):
            await store.get(unknown)


async def test_a_trace_that_a_client_began_is_listed(redis: RedisProcess) -> None:
    """Its first span has a parent, which is the client's and is not kept here."""
    keys, blocking = Keys("test-entry"), connect_blocking(redis.url)
    spans = [
        SpanRecord("1" * 32, "a", "of-the-client", "Generate", "router", 1.0, 0.5, entry=True),
        SpanRecord("1" * 32, "b", "a", "Generate", "worker", 1.1, 0.3),
        SpanRecord("2" * 32, "c", "not-there", "Generate", "worker", 1.2, 0.3),
    ]
    write_spans(blocking, keys, spans, 20)
    client = connect(redis.url)
    listed = await TraceStore(client, keys).last(5)
    assert [[span.span_id for span in trace] for trace in listed] == [["a", "b"]]
    await client.aclose()
    blocking.close()
