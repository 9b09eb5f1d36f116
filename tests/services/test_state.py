"""What is kept in Redis, in a real one: leases, plan revisions, traces."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from redis.asyncio import Redis

from penstock.services.domain.errors import NotFound, RevisionConflict
from penstock.services.domain.instances import InstanceRecord, Load, ModelCard, Role, SloHeadroom
from penstock.services.domain.mesh_view import MeshView
from penstock.services.field_problems import from_json
from penstock.services.stalls import STALL_S, TICK_S
from penstock.services.state import codec, instances
from penstock.services.state.connection import StateUnavailable, connect, connect_blocking
from penstock.services.state.feed import MeshFeed
from penstock.services.state.instances import MAX_ENTRY_BYTES, InstanceStore, Pull
from penstock.services.state.keys import Keys, tier_group
from penstock.services.state.plans import PlanStore
from penstock.services.state.registry import Registrar
from penstock.services.state.traces import PAGE_SPANS, SPANS_PER_TRACE, SpanRecord, TraceStore, write_spans
from penstock.types.mesh_status import Drafting, Loading, StagePlace
from penstock.types.plans import Plan, TierPlan
from tests.support.present import present
from tests.support.services import RedisProcess
from tests.support.waiting import until, until_answered

CARD = ModelCard("small", "m", "d", "torch", 100, 10, 16, 8)
PULL_S = 0.02
STOPPED_LEASE_S = 2.5  # of an instance that is heard again after the feed stood still; time for that on a busy machine
PLAN = Plan(0, (TierPlan("small", "m", 50.0, 1), TierPlan("large", "n", None, 2)), scorer="judge-model")


def record(name: str, lease_s: float = 60.0) -> InstanceRecord:
    return InstanceRecord(name, Role.WORKER, "h:1", 1.0, 0, lease_s, model=CARD)


def test_records_and_plans_survive_json() -> None:
    load = Load(
        (1, 2),
        (3,),
        4,
        5.5,
        (1, 1, 3),
        slo=SloHeadroom(0.25, 1000.0, 64),
        drafting=Drafting(("s", "m"), 5, 0.75),
        loading=Loading(0.5, 20.0),
    )
    full = dataclasses.replace(record("w"), load=load, draining=True, place=StagePlace(1, 8, 64), http_address="h:2")
    plain = InstanceRecord("j", Role.JUDGE, "h:1", 1.0, 2, 3.0)
    for each in (full, plain):
        registration = codec.registration_from_json(codec.registration_to_json(each))
        assert (registration.sequence, registration.load, registration.place) == (0, None, None)
        read = None if each.load is None else codec.load_from_json(codec.load_to_json(each.load))
        assert from_json(codec.Head, codec.head_to_json(each)).record(registration, read) == each
    assert from_json(codec.Head, codec.head_to_json(full, gone=True)).gone
    assert codec.plan_from_json(codec.plan_to_json(PLAN)) == PLAN
    for broken in (b"{", b"[]", b"\xff", b"[" * 100_000, b'{"instance_id": 1}', b'{"at": [1.0]}', b'{"run": 1}'):
        for decode in (
            codec.registration_from_json,
            partial(from_json, codec.Head),
            codec.load_from_json,
            codec.plan_from_json,
        ):
            if (decode, broken) in {
                (codec.load_from_json, b'{"instance_id": 1}'),
                (codec.load_from_json, b'{"at": [1.0]}'),
            }:  # unknown fields
                continue
            with pytest.raises(ValueError, match=r"."):
                decode(broken)


def test_a_plan_of_before_best_answers_always_delivers_the_last_one() -> None:
    best = dataclasses.replace(PLAN, best_answer=True)
    assert codec.plan_from_json(codec.plan_to_json(best)) == best
    earlier = json.loads(codec.plan_to_json(best))
    del earlier["best_answer"]
    assert codec.plan_from_json(json.dumps(earlier).encode()) == PLAN
    with pytest.raises(ValueError, match="best_answer"):
        codec.plan_from_json(json.dumps(earlier | {"best_answer": 1}).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "[1, -1]"),
        ("wait", '["1"]'),
        ("in", "[true]"),
        ("in", f"[{2**53 + 1}]"),
        ("free", f"{10**400}"),
        ("out_rate", f"{10**400}"),
        ("run", "7"),
        ("free", "1.5"),
        ("cached", "-1"),
        ("out_rate", "1e999"),
        ("in_rate", "NaN"),
        ("kv_rate", '"fast"'),
        ("pending", "[]"),
        ("slo", "[1.0, 2.0]"),
        ("drafting", '["model", 1, null]'),
        ("loading", "[0.5]"),
    ],
)
def test_a_load_that_placement_could_not_use_is_refused(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        codec.load_from_json(f'{{"{field}": {value}}}'.encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lease_s", 0),
        ("lease_s", "3"),
        ("epoch", None),
        ("address", 5),
        ("address", "\ud800"),
        ("instance_id", "a\nb"),
        ("instance_id", "a" * 5000),
        ("model", {"tier": 1}),
        ("model", {}),
        ("role", 1),
    ],
)
def test_a_registration_is_refused_with_the_name_of_the_field(field: str, value: object) -> None:
    data = json.loads(codec.registration_to_json(record("w"))) | {field: value}
    with pytest.raises(ValueError, match=f"{field}|hex escape"):
        codec.registration_from_json(json.dumps(data).encode())


async def test_a_registration_of_a_far_version_is_named_and_one_of_the_last_is_read(client: Redis, keys: Keys) -> None:
    """The services of a mesh can be replaced one by one; who is too far away says so, with both versions."""
    group, view = tier_group("small"), MeshView()
    await client.sadd(keys.groups, group)
    for name, written in (("last", {"format": codec.FORMAT - 1}), ("far", {"format": 99, "version": "9.9"})):
        each = dataclasses.replace(record("w"), instance_id=name)
        data = json.loads(codec.registration_to_json(each)) | written
        await client.set(keys.instance(name), json.dumps(data))
        await client.hset(keys.load(group), name, entry(codec.head_to_json(each)))
    async with MeshFeed(client, keys, view, interval_s=PULL_S) as feed:
        await feed.synced.wait()
        assert [each.instance_id for each in view.instances()] == ["last"]
        said = view.unreadable_reason
    assert "of 1 ignored, far: " in said
    assert f"format 99 (Penstock 9.9), but this process reads {codec.FORMAT - 1} and {codec.FORMAT}" in said


async def test_an_instance_is_seen_while_it_lives_and_gone_with_a_goodbye(client: Redis, keys: Keys) -> None:
    view = MeshView()
    load = Load((5,), (), 9, 1.0)
    async with MeshFeed(client, keys, view, interval_s=PULL_S) as feed:
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
    async with MeshFeed(client, keys, view, interval_s=PULL_S) as feed:
        await feed.synced.wait()
        registrar = Registrar(client, keys, record("w", lease_s=0.6), interval_s=0.05)
        await registrar.__aenter__()
        await until(lambda: view.instances())
        registrar._tasks[0].cancel()  # as if the process had been killed: no goodbye
        await until(lambda: not view.instances())
        async with MeshFeed(client, keys, other, interval_s=PULL_S) as late:
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
    async with MeshFeed(client, keys, view, interval_s=PULL_S) as feed:
        await feed.synced.wait()
        await InstanceStore(client, keys).publish(record("w", lease_s=STOPPED_LEASE_S))
        await until(lambda: view.instances())
        time.sleep(STOPPED_LEASE_S + TICK_S + STALL_S)  # noqa: ASYNC251 - the loop stands still
        await PlanStore(client, keys).publish(PLAN)
        await until(lambda: view.plan is not None)
        looked = looks[0]
        await until(lambda: looks[0] >= looked + 2)
        assert view.instances()
        await until(lambda: not view.instances())


def entry(head: bytes, *, lease_ms: int = 60_000, stamp_ms: float | None = None) -> bytes:
    """An entry as it is in the hash of a group; written now unless said otherwise."""
    return b"%d %d %s" % (time.time() * 1000 if stamp_ms is None else stamp_ms, lease_ms, head)


async def test_unusable_entries_are_skipped_counted_and_logged_by_name(
    client: Redis, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the others have written, a good instance is seen, and the feed goes on."""
    group, good = tier_group("small"), codec.head_to_json(record("x"))
    junk: dict[Any, Any] = {
        "empty": b"",
        "words": b"nonsense",
        "no-lease": b"12 " + good,
        "long-time": b"9" * 5000 + b" " + b"9" * 5000 + b" " + good,
        "broken": entry(b"{not json"),
        "deep": entry(b"[" * 50_000),
        "large": entry(good + b" " * MAX_ENTRY_BYTES),
        "line\nfeed 3 4\n": entry(b"\n\n"),
        "load": entry(good + b"\n" + b'{"run": [-1]}'),
        "\ud800".encode(errors="surrogatepass").decode(errors="replace"): entry(b"5"),
    }
    not_read = {
        "without-registration": entry(good),
        "past": entry(good, stamp_ms=5),
        "future": entry(good, stamp_ms=1e14),
    }
    wrong_group = dataclasses.replace(record("judge-1"), model=None, role=Role.JUDGE)
    await client.sadd(keys.groups, group)
    await client.hset(keys.load(group), mapping=junk | not_read | {"judge-1": entry(good)})
    await client.set(keys.instance("judge-1"), codec.registration_to_json(wrong_group))
    await client.set(keys.plan_revision, "nonsense")
    views = MeshView(), MeshView()
    async with (
        MeshFeed(client, keys, views[0], interval_s=PULL_S) as router,
        MeshFeed(client, keys, views[1], interval_s=PULL_S, group=group, sample=lambda: ["w"]) as worker,
        Registrar(client, keys, record("w"), interval_s=0.05, load=Load),
    ):
        await until(lambda: all(view.find("w") for view in views))
        await until(lambda: views[1].instances()[0].load is not None)
        assert router.unusable_entries == len(junk)
        # it reads no load, but knows that judge-1 is of another group, perhaps one pull later
        await until(lambda: worker.unusable_entries == len(junk))
        assert [r.instance_id for r in views[1].instances()] == ["w"]
        version = views[0].version
        await client.hset(
            keys.load(group), "w", entry(codec.head_to_json(dataclasses.replace(record("w"), sequence=999)))
        )
        await until(lambda: views[0].version > version)
        assert router.unusable_entries == len(junk), "what has not changed is not counted again"
    for name in junk:
        assert f"the entry of {name!r}" in caplog.text
    assert "the entry of 'judge-1': group" in caplog.text
    assert caplog.text.count("the entry of 'words'") == 2, "once by each feed"
    assert await client.hexists(keys.load(group), "past") == await client.hexists(keys.load(group), "future") == 0
    assert await client.hexists(keys.load(group), "w")


@pytest.mark.parametrize(
    "snapshot", [b"nonsense", b"-5 0 -5\nabcde", b"1 2\nx", b"9" * 6000, b"3 4 999999\nabc", b"\xff\n"]
)
async def test_a_damaged_snapshot_is_replaced_by_the_next_one(client: Redis, keys: Keys, snapshot: bytes) -> None:
    group, view = tier_group("small"), MeshView()
    await client.sadd(keys.groups, group)
    await client.set(keys.snapshot(group, heads=False), snapshot, px=300)
    async with (
        MeshFeed(client, keys, view, interval_s=PULL_S) as feed,
        Registrar(client, keys, record("w"), interval_s=0.05),
    ):
        await until(lambda: view.instances())
        assert [r.instance_id for r in view.instances()] == ["w"]
        assert feed.unusable_entries >= 1


async def test_revisions_are_numbered_without_gaps_whoever_publishes(client: Redis, keys: Keys) -> None:
    store = PlanStore(client, keys)
    assert await store.current() is None
    made = await asyncio.gather(*(store.publish(PLAN) for _ in range(20)))
    assert sorted(plan.revision for plan in made) == list(range(1, 21))
    current = present(await store.current())
    assert current.revision == 20
    assert (await store.get(7)).revision == 7
    with pytest.raises(NotFound):
        await store.get(21)


async def test_publishing_may_depend_on_the_revision(client: Redis, keys: Keys) -> None:
    store = PlanStore(client, keys)
    await store.publish(PLAN, expected=0)
    with pytest.raises(RevisionConflict, match="expected revision 0, but the current one is 1"):
        await store.publish(PLAN, expected=0)
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


async def test_a_worker_knows_its_tier_and_the_load_of_its_sample(client: Redis, keys: Keys) -> None:
    """A worker reads which places the others serve, and the load of those that it names; nothing of other tiers."""
    other = dataclasses.replace(record("other"), model=dataclasses.replace(CARD, tier="large"))
    own, everything, sample = MeshView(), MeshView(), ["w"]
    load = Load((5,), (), 9, 1.0)
    group = tier_group("small")
    async with (
        MeshFeed(client, keys, own, interval_s=PULL_S, group=group, sample=lambda: sample) as feed,
        MeshFeed(client, keys, everything, interval_s=PULL_S),
    ):
        await feed.synced.wait()
        async with (
            Registrar(client, keys, other, interval_s=0.02, load=lambda: load),
            Registrar(client, keys, record("v"), interval_s=0.02, load=lambda: load),
            Registrar(client, keys, record("w"), interval_s=0.02, load=lambda: load, place=lambda: StagePlace(0, 0, 9)),
        ):
            await until(lambda: len(everything.instances()) == 3 and len(own.instances()) == 2)
            assert all(r.load == load for r in everything.instances())
            await until(lambda: own.instances()[1].load == load)
            v, w = own.instances()
            assert (v.instance_id, v.load, v.place) == ("v", None, None)
            assert (w.instance_id, w.place) == ("w", StagePlace(0, 0, 9))
            sample[:] = ["v", "unknown"]
            await until(lambda: own.instances()[0].load == load)  # although its entry has not changed
        await until(lambda: not own.instances() and not everything.instances())


async def test_a_worker_of_a_large_tier_reads_the_places_of_all_less_often(
    client: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no lease expires meanwhile, although entries are older than the lease between two such pulls."""
    monkeypatch.setattr("penstock.services.state.feed.HEADS_PER_PULL", 1)
    store, view, group = InstanceStore(client, keys), MeshView(), tier_group("small")
    pulls: list[int] = []
    pull = InstanceStore.pull

    async def counted(self: InstanceStore, groups: Sequence[str], **more: Any) -> Pull:
        pulls.append(len(groups))
        return await pull(self, groups, **more)

    monkeypatch.setattr(InstanceStore, "pull", counted)
    for i in range(5):
        await store.publish(record(f"w{i}"))
    async with MeshFeed(client, keys, view, interval_s=PULL_S, group=group, sample=lambda: ["w0"]) as feed:
        await feed.synced.wait()
        assert len(view.instances()) == 5
        assert await feed.find("w9") is None
        await store.publish(record("w9"))
        found = present(await feed.find("w9"))
        assert found.instance_id == "w9"
        pulls.clear()
        await until(lambda: len(pulls) >= 24)
        assert 3 <= sum(pulls) <= 6


async def test_a_record_is_as_old_as_the_store_says(client: Redis, keys: Keys) -> None:
    """Requests that were sent after an instance wrote its record are not in it, however late the record is read."""
    store, view, loop = InstanceStore(client, keys), MeshView(), asyncio.get_running_loop()
    await store.publish(record("w"))
    wrote = loop.time()
    await asyncio.sleep(0.4)
    async with MeshFeed(client, keys, view, interval_s=PULL_S) as feed:
        await feed.synced.wait()
        heard_at = view.heard_at_s("w")
        assert heard_at <= wrote + 0.002, "times are in whole milliseconds"
        await store.publish(dataclasses.replace(record("w"), sequence=1))
        await until(lambda: view.instances()[0].sequence == 1)
        assert view.heard_at_s("w") > heard_at


async def test_readers_at_the_same_time_share_a_snapshot(client: Redis, keys: Keys) -> None:
    """The store puts it together once; what is written meanwhile is in the next one."""
    store, group = InstanceStore(client, keys), tier_group("small")
    await store.publish(record("a"))
    for _ in range(20):
        first = await store.pull([group])
        await store.publish(record("b"))
        second = await store.pull([group])
        if [e.instance_id for e in second.snapshots] == [e.instance_id for e in first.snapshots] == ["a"]:
            break
        await client.delete(keys.snapshot(group, heads=False))
        await store.publish(record("b"), gone=True)
        await client.hdel(keys.load(group), "b")
    else:
        pytest.fail("every pull made a snapshot of its own")

    async def both() -> bool:
        return len((await store.pull([group])).snapshots) == 2

    await until_answered(both)


async def test_a_snapshot_of_a_large_group_serves_longer(
    client: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In proportion to its entries, as the time that the store takes to put it together."""
    store, group = InstanceStore(client, keys), tier_group("small")
    monkeypatch.setattr(instances, "ENTRIES_PER_MS", 1 / 300_000)
    await store.publish(record("a"))
    await store.publish(record("b"))
    await store.pull([group])
    assert 300_000 < await client.pttl(keys.snapshot(group, heads=False)) <= 600_000


async def test_an_instance_that_has_gone_is_not_taken_for_lost_data(own_redis: RedisProcess, keys: Keys) -> None:
    """A store without any data says nothing of its instances: they have a lease to write again."""
    client, view = connect(own_redis.url), MeshView()
    async with (
        MeshFeed(client, keys, view, interval_s=PULL_S),
        Registrar(client, keys, record("w", lease_s=3.0), interval_s=0.05),
    ):
        await until(lambda: view.instances())
        version = view.instances()[0].version
        await client.flushall()
        while (seen := view.instances()) and seen[0].version == version:
            await asyncio.sleep(0)
        assert seen, "it was dropped before it had written again"
    await client.aclose()


async def test_the_feed_survives_an_outage(own_redis: RedisProcess, keys: Keys) -> None:
    client, view, changes = connect(own_redis.url), MeshView(), asyncio.Event()
    async with MeshFeed(client, keys, view, interval_s=PULL_S, on_change=changes.set) as feed:
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
        return SpanRecord(f"{name}{trace}", parent, name, "router", float(trace), 0.5, trace_id=f"{trace:032x}")

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
    spans = [SpanRecord(f"s{i}", "", "root", "router", float(i), 0.5, trace_id=f"{i:032x}") for i in range(count)]
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
        SpanRecord("a", "of-the-client", "Generate", "router", 1.0, 0.5, trace_id="1" * 32, entry=True),
        SpanRecord("b", "a", "Generate", "worker", 1.1, 0.3, trace_id="1" * 32),
        SpanRecord("c", "not-there", "Generate", "worker", 1.2, 0.3, trace_id="2" * 32),
    ]
    write_spans(blocking, keys, spans, 20)
    client = connect(redis.url)
    listed = await TraceStore(client, keys).last(5)
    assert [[span.span_id for span in trace] for trace in listed] == [["a", "b"]]
    await client.aclose()
    blocking.close()
