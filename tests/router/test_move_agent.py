"""The router's agent against real workers: who is late is left out, and who waits too long for a turn stays."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest
from opentelemetry.context import Context
from opentelemetry.metrics import NoOpMeter
from opentelemetry.trace import NoOpTracer

from router_service.clients.bid_client import BidClient
from router_service.clients.reply_multiplexer import MultiplexerPool
from router_service.clients.worker_client import WorkerClient
from router_service.migration.bidding import BidLimits, MoveAgent
from router_service.migration.movable_reply import MovableReply, Moved, NotMoved
from services.channels import ChannelPool
from services.domain import GenerationRequest, InstanceRecord, MeshView, Role, SamplingParams, TextPrompt
from services.domain.stages.advice import MoveAdvice, MoveReason
from services.domain.stages.bidding import Ask
from services.domain.stages.places import StagePlace
from services.testing import RedisProcess, serving
from tests.conftest import MeshFileMaker
from tests.support.mesh import COMPOSE

Reply = TypeVar("Reply", bound=MovableReply)
ADVICE = MoveAdvice(MoveReason.RANGE_CROSSED, 100, 100)
REQUEST = GenerationRequest("r", TextPrompt("hello"), SamplingParams(seed=1))


@dataclass
class Scene:
    """A sender of stage 0, and receivers of stage 1 by name."""

    channels: ChannelPool
    sessions: MultiplexerPool
    view: MeshView
    sender: InstanceRecord
    digest: str

    def agent(self, bid_s: float = 60.0, turn_s: float = 60.0) -> MoveAgent:
        limits = BidLimits(bid_s, turn_s)
        return MoveAgent(self.view, BidClient(self.channels), NoOpTracer(), NoOpMeter("test"), limits)

    def hear(self, name: str, address: str, stage: int) -> InstanceRecord:
        record = InstanceRecord(
            name, Role.WORKER, address, 1.0, 1, 9.0, model=self.sender.model, place=StagePlace(stage, 0, 1000)
        )
        self.view.hear(record, 0.0)
        return record

    def reply(self) -> MovableReply:
        return self.reply_of(MovableReply)

    def reply_of(self, kind: type[Reply]) -> Reply:
        workers = WorkerClient(self.channels, self.sessions, 60.0)
        deadline_s = asyncio.get_running_loop().time() + 60
        return kind(workers, self.sender, REQUEST, deadline_s, (), on_event=lambda _: None, on_tokens=lambda _: None)


@pytest.fixture
async def scene(redis: RedisProcess, mesh_file: MeshFileMaker) -> AsyncIterator[Scene]:
    file = mesh_file([{"name": "only", "model": "sim"}], stages={"max_transfers": 2})
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(
            serving(Role.WORKER, COMPOSE[Role.WORKER], file, redis.url, tier="only", instance_id="receiver")
        )
        channels = await stack.enter_async_context(ChannelPool())
        sessions = await stack.enter_async_context(MultiplexerPool(channels))
        assert worker.model is not None
        sender = InstanceRecord(
            "sender", Role.WORKER, "127.0.0.1:1", 1.0, 1, 9.0, model=worker.model, place=StagePlace(0, 0, 50)
        )
        view = MeshView(keep_expired={Role.WORKER})
        view.connect([sender], None, 0.0)
        made = Scene(channels, sessions, view, sender, worker.model.digest)
        made.hear("receiver", worker.address, 1)
        yield made


async def test_who_does_not_answer_holds_up_nobody(scene: Scene) -> None:
    """The first bid decides when the others are too late, not `bid_timeout_s`."""
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections and says nothing
        scene.hear("mute", f"127.0.0.1:{mute.getsockname()[1]}", 1)
        async with (
            asyncio.timeout(40),
            scene.agent(bid_s=60.0)._arranged("only", "sender", "r", ADVICE, Context()) as grant,
        ):
            assert grant is not None
            assert grant.target.instance_id == "receiver"
            assert not await grant.confirmation.turn()


async def test_replies_leave_a_sender_without_a_lease_for_receivers_that_have_one(scene: Scene) -> None:
    """A worker that has lost Redis may still hand its replies over, as when it drains; it is given none."""
    scene.view.alive(9.1)
    assert scene.view.expire() == ["receiver", "sender"]
    async with scene.agent()._arranged("only", "sender", "r", ADVICE, Context()) as grant:
        assert grant is None
    receiver = scene.view.find("receiver")
    assert receiver is not None
    scene.view.hear(replace(receiver, sequence=2), 9.2)
    async with scene.agent()._arranged("only", "sender", "r", ADVICE, Context()) as grant:
        assert grant is not None
        assert grant.target.instance_id == "receiver"


async def test_nobody_to_ask_or_nobody_who_takes_it(scene: Scene) -> None:
    agent = scene.agent()
    too_long = MoveAdvice(MoveReason.RANGE_CROSSED, 10**6, 10**6)
    assert await agent.follow("only", scene.reply(), "r", too_long, Context()) == NotMoved("no worker takes it")
    overloaded = MoveAdvice(MoveReason.OVERLOADED, 100, 100)
    assert await agent.follow("only", scene.reply(), "r", overloaded, Context()) == NotMoved("no worker takes it")
    assert (agent.moved, agent.stayed) == (0, 2)


async def test_a_request_that_gets_no_turn_stays_and_leaves_the_queue(scene: Scene) -> None:
    agent, client = scene.agent(turn_s=0.5), BidClient(scene.channels)
    receiver = next(r for r in scene.view.instances() if r.instance_id == "receiver")
    async with AsyncExitStack() as stack:
        for name in ("a", "b"):  # both slots
            held = await stack.enter_async_context(
                client.confirmed(receiver.address, Ask(name, "x", 10, 10), scene.digest, timeout_s=30, metadata=())
            )
            await held.turn()
        outcome = await agent.follow("only", scene.reply(), "r", ADVICE, Context())
        assert isinstance(outcome, NotMoved)
    again = Ask("r", "sender", 100, 100)
    async with asyncio.timeout(60):
        while isinstance(
            await client.ask(receiver.address, "receiver", again, scene.digest, timeout_s=60, metadata=()), str
        ):  # known_already, until the cancelled call has been heard of
            await asyncio.sleep(0.01)


class SlowReply(MovableReply):
    """A reply whose transfer takes until `arrived` is set."""

    arrived: asyncio.Event

    async def move(
        self,
        target: InstanceRecord,
        why: str,
        *,
        starving: bool = False,
        on_started: Callable[[], Awaitable[None]] | None = None,
    ) -> Moved | NotMoved:
        assert on_started is not None
        await on_started()
        await self.arrived.wait()
        return Moved(1, 0.0, 0)


async def test_a_transfer_keeps_its_slot_however_long_it_takes(scene: Scene) -> None:
    """`turn_timeout_s` limits the wait for the start alone: the slot is taken as long as KV moves."""
    turn_s = 1.0
    agent, client, reply = scene.agent(turn_s=turn_s), BidClient(scene.channels), scene.reply_of(SlowReply)
    reply.arrived = asyncio.Event()
    receiver = scene.view.find("receiver")
    assert receiver is not None
    following = asyncio.create_task(agent.follow("only", reply, "r", ADVICE, Context()))
    again = Ask("r", "sender", 100, 100)

    async def known() -> bool:
        answer = await client.ask(receiver.address, "receiver", again, scene.digest, timeout_s=60, metadata=())
        return answer == "known_already"

    async with asyncio.timeout(60):
        while not await known():
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.5 * turn_s)  # the limit that must not end it
        assert await known()
        assert not following.done()
        reply.arrived.set()
        assert isinstance(await following, Moved)
        while await known():
            await asyncio.sleep(0.01)


async def test_a_sender_that_is_gone_moves_nothing(scene: Scene) -> None:
    outcome = await scene.agent().follow("only", scene.reply(), "r", ADVICE, Context())
    assert isinstance(outcome, NotMoved), "MigrateOut cannot reach the sender: the reply is the stream's business"
