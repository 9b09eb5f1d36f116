"""Length stages live: real planner, router and torch workers; replies move on as they grow and clients see one reply."""

import asyncio
import dataclasses
import functools
import re
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

from models.training import tasks
from penstock import AsyncClient, AsyncPlannerClient, Finished, InstanceChanged, Span, Stage, Tokens, Trace
from penstock.services.domain.instances import Role
from penstock.types.plans import QoeModel
from tests.conftest import FAMILY, MeshRunner
from tests.support.measured import trace_with
from tests.support.mesh import TestMesh

STAGES = (Stage(0, 110, 2), Stage(110, 100_000, 1))
QOE = (0.0, 0.0, 0.0, 0.0, 1e-6)
TRIES = 10  # of replies that may all be over before a worker has looked at them, where others take the cores


@functools.cache
def prompts() -> list[str]:
    """Drawn when a test needs them: everyone who collects tests imports this module."""
    return [p.prompt for p in tasks.single_turns(300, seed=43) if len(p.prompt) < 60 and len(p.reply) > 100][:8]


@pytest.fixture
async def mesh(run_mesh: MeshRunner) -> AsyncIterator[TestMesh]:
    tier = {"name": "only", "model": str(FAMILY / "small"), "engine": "torch", "workers": 3}
    # A bandwidth that is measured while this process stands still would be so low that no move pays.
    async with run_mesh([tier], stages={"look_s": 0.05, "refine_s": 1000.0, "kv_bandwidth_gb_per_s": 0.5}) as running:
        yield running


async def lay_out(mesh: TestMesh, stages: tuple[Stage, ...]) -> None:
    """Publish stages, and return once every worker has its place."""
    async with AsyncPlannerClient(mesh.parts["planner-0"].admin_address) as planner:
        plan = await planner.get_plan()
        tier = dataclasses.replace(plan.tiers[0], stages=stages, qoe=QoeModel(*QOE) if stages else None)
        await planner.set_plan(dataclasses.replace(plan, tiers=(tier,)))
    wanted = sorted(i for i, stage in enumerate(stages) for _ in range(stage.instances))
    await mesh.until(lambda s: sorted(i.place.stage for i in s.instances if i.place is not None) == wanted)


class Seen(NamedTuple):
    """A whole reply, and where it went."""

    text: str
    changes: list[InstanceChanged]
    trace_id: str


async def read(client: AsyncClient, prompt: str, number: int) -> Seen:
    """Read a reply to its end, checking its offsets."""
    text, tokens, changes, trace_id = "", 0, list[InstanceChanged](), ""
    async for event in client.stream(prompt, temperature=0.9, seed=number, max_tokens=200, ignore_eos=True):
        if isinstance(event, Tokens):
            assert event.offset == tokens, "every token once"
            tokens += len(event.token_ids)
            text += event.text
        elif isinstance(event, InstanceChanged):
            assert event.offset == tokens
            changes.append(event)
        elif isinstance(event, Finished):
            trace_id = event.trace_id
    return Seen(text, changes, trace_id)


@pytest.mark.slow
async def test_replies_move_on_as_they_grow_and_their_text_is_the_same(mesh: TestMesh) -> None:
    async with mesh.client() as client:
        still = await asyncio.gather(*(read(client, p, i) for i, p in enumerate(prompts())))
        assert not any(seen.changes for seen in still), "without stages nothing moves"
        await lay_out(mesh, STAGES)
        places = {i.instance_id: i.place for i in (await client.status()).instances if i.place is not None}
        last = max(places, key=lambda name: places[name].from_tokens)
        changes, onward = list[InstanceChanged](), list[InstanceChanged]()
        for _ in range(TRIES):
            moved = await asyncio.gather(*(read(client, p, i) for i, p in enumerate(prompts())))
            assert [seen.text for seen in moved] == [seen.text for seen in still]
            changes += [c for seen in moved for c in seen.changes]
            if onward := [c for seen in moved for c in seen.changes if c.reason == "range_crossed"]:
                break
        assert onward, "replies outgrow the first stage"
        assert {c.to_instance_id for c in onward} == {last}
        status = await client.status()
        assert status.migrations == len(changes)
        assert status.failovers == 0
        trace_id = next(seen.trace_id for seen in moved if any(c.reason == "range_crossed" for c in seen.changes))
        migration = await migration_span(client, trace_id)
        assert migration.attributes["penstock.to"] == last
        assert {"penstock.offset", "penstock.stall_s", "penstock.sent_bytes"} <= set(migration.attributes)
    router, receiver = await mesh.metrics(), await mesh.metrics(last)
    assert re.search(r'penstock_router_move_advice_total\{.*penstock_outcome="moved"', router)
    assert "penstock_router_migrations_total{" in router
    assert "penstock_worker_bids_total{" in receiver


async def migration_span(client: AsyncClient, trace_id: str) -> Span:
    """The span of the move to the next stage, once what belongs to it has arrived in the request's trace."""
    generate, place, confirm = (f"penstock.worker.v1.WorkerService/{n}" for n in ("Generate", "PlaceBid", "ConfirmBid"))

    def moves(trace: Trace) -> list[Span]:
        names, found = {span.span_id: span.name for span in trace.spans}, list[Span]()
        for span in trace.spans:
            crossed = span.name == "migration" and span.attributes["penstock.reason"] == "range_crossed"
            if crossed and "penstock.not_moved" not in span.attributes:  # an earlier try may have come to nothing
                inside = {s.span_id for s in trace.spans if s.parent_span_id == span.span_id and s.name == "bid-ask"}
                asked = {s.name for s in trace.spans if s.parent_span_id in inside}
                if names.get(span.parent_span_id) == generate and asked == {place, confirm}:
                    found.append(span)
        return found

    return moves(await trace_with(client, trace_id, moves))[0]


@pytest.mark.slow
async def test_places_and_replies_close_up_when_a_worker_drains_and_open_when_it_is_back(run_mesh: MeshRunner) -> None:
    slow = {"overhead_ms": 5.0, "token_us": 0.0, "context_token_ns": 0.0, "reply_tokens": 10_000}
    tier = {"name": "only", "model": "sim", "workers": 3, "simulated": slow}
    async with run_mesh([tier], stages={"look_s": 0.05}) as mesh, mesh.client() as client:
        still = await asyncio.gather(*(read(client, p, i) for i, p in enumerate(prompts())))
        await lay_out(mesh, STAGES)
        running = [asyncio.create_task(read(client, p, i)) for i, p in enumerate(prompts())]
        await mesh.until(lambda s: any(i.running > 1 and i.place and i.place.stage == 0 for i in s.instances))
        places = {i.instance_id: i.place for i in (await client.status()).instances if i.place is not None}
        first = min(name for name, place in places.items() if place.stage == 0)
        await mesh.stop(first)
        moved = await asyncio.gather(*running)
        assert [seen.text for seen in moved] == [seen.text for seen in still]
        assert any(c.reason == "draining" and c.from_instance_id == first for seen in moved for c in seen.changes)
        assert (await client.status()).failovers == 0
        await mesh.until(lambda s: sorted(i.place.stage for i in s.instances if i.place is not None) == [0, 1])
        await mesh.start(Role.WORKER, first, tier="only")
        await mesh.until(lambda s: sorted(i.place.stage for i in s.instances if i.place is not None) == [0, 0, 1])
