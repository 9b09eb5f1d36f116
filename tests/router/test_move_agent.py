"""The router's agent against real workers: who is late is left out, and who waits too long for a turn stays."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest
from grpc import aio
from opentelemetry.context import Context
from opentelemetry.metrics import NoOpMeter
from opentelemetry.trace import NoOpTracer

from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.router_service.clients.reply_multiplexer import MultiplexerPool
from penstock.router_service.clients.worker_client import WorkerClient
from penstock.router_service.migration.bidding import MoveAgent, candidates
from penstock.router_service.migration.movable_reply import MovableReply
from penstock.services.channels import ChannelPool
from penstock.services.domain.instances import InstanceRecord, ModelCard, Role
from penstock.services.domain.mesh_view import MeshView
from penstock.services.domain.stages.bidding import Ask
from penstock.services.mesh_schema.stages import MeshStages
from penstock.types.mesh_status import ReplyMoved, StagePlace
from penstock.types.prompts import TextPrompt
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.workers import MoveAdvice, MoveReason, NotMoved
from tests.conftest import MeshFileMaker
from tests.support.mesh import COMPOSE
from tests.support.present import present
from tests.support.services import RedisProcess, serving
from tests.support.waiting import until_answered

ADVICE = MoveAdvice(MoveReason.RANGE_CROSSED, 100, 100)
REQUEST = GenerationRequest("r", TextPrompt("hello"), SamplingParams(seed=1))


class Mute(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that takes calls for bids and never answers them."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def PlaceBid(self, request: pb.PlaceBidRequest, context: Any) -> pb.PlaceBidResponse:  # noqa: N802 - as in the contract
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


@dataclass
class Scene:
    """A sender of stage 0, and receivers of stage 1 by name."""

    channels: ChannelPool
    sessions: MultiplexerPool
    view: MeshView
    sender: InstanceRecord
    digest: str

    def agent(self, bid_s: float = 60.0, turn_s: float = 60.0) -> MoveAgent:
        limits = MeshStages(bid_timeout_s=bid_s, turn_timeout_s=turn_s)
        return MoveAgent(self.view, self.client(), NoOpTracer(), NoOpMeter("test"), limits)

    def client(self) -> WorkerClient:
        return WorkerClient(self.channels, self.sessions, 60.0)

    def hear(self, name: str, address: str, stage: int) -> InstanceRecord:
        record = InstanceRecord(
            name, Role.WORKER, address, 1.0, 1, 9.0, model=self.sender.model, place=StagePlace(stage, 0, 1000)
        )
        self.view.hear(record, 0.0)
        return record

    def reply(self, kind: type[MovableReply] = MovableReply) -> Any:
        deadline_s = asyncio.get_running_loop().time() + 60
        return kind(
            self.client(), self.sender, REQUEST, deadline_s, (), on_event=lambda _: None, on_tokens=lambda _: None
        )


@pytest.fixture
async def scene(redis: RedisProcess, mesh_file: MeshFileMaker) -> AsyncIterator[Scene]:
    file = mesh_file([{"name": "only", "model": "sim"}], stages={"max_transfers": 2})
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(
            serving(Role.WORKER, COMPOSE[Role.WORKER], file, redis.url, tier="only", instance_id="receiver")
        )
        channels = await stack.enter_async_context(ChannelPool())
        sessions = await stack.enter_async_context(MultiplexerPool(channels))
        sender = InstanceRecord(
            "sender", Role.WORKER, "127.0.0.1:1", 1.0, 1, 9.0, model=present(worker.model), place=StagePlace(0, 0, 50)
        )
        view = MeshView(keep_expired={Role.WORKER})
        view.connect([sender], None, 0.0)
        made = Scene(channels, sessions, view, sender, present(worker.model).digest)
        made.hear("receiver", worker.address, 1)
        yield made


async def test_who_does_not_answer_holds_up_nobody(scene: Scene) -> None:
    """The first bid decides when the others are too late, not `bid_timeout_s`."""
    mute, server = Mute(), aio.server()  # type: ignore[abstract] # nothing else is called
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(mute, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    scene.hear("mute", f"127.0.0.1:{port}", 1)
    async with scene.agent(bid_s=3600.0)._arranged("only", "sender", "r", ADVICE, Context()) as (target, confirmation):
        assert target.instance_id == "receiver"
        assert not await confirmation.turn()
        await mute.asked.wait()
    await server.stop(None)


async def test_replies_leave_a_sender_without_a_lease_for_receivers_that_have_one(scene: Scene) -> None:
    """A worker that has lost Redis may still hand its replies over, as when it drains; it is given none."""
    scene.view.alive(9.1)
    assert sorted(scene.view.expire()) == ["receiver", "sender"]
    refused = NotMoved("no worker takes it")
    assert await scene.agent().follow("only", scene.reply(), "r", ADVICE, Context()) == refused
    receiver = present(scene.view.find("receiver"))
    scene.view.hear(replace(receiver, sequence=2), 9.2)
    async with scene.agent()._arranged("only", "sender", "r", ADVICE, Context()) as (target, _):
        assert target.instance_id == "receiver"


async def test_nobody_to_ask_or_nobody_who_takes_it(scene: Scene) -> None:
    agent = scene.agent()
    too_long = MoveAdvice(MoveReason.RANGE_CROSSED, 10**6, 10**6)
    assert await agent.follow("only", scene.reply(), "r", too_long, Context()) == NotMoved("no worker takes it")
    overloaded = MoveAdvice(MoveReason.OVERLOADED, 100, 100)
    assert await agent.follow("only", scene.reply(), "r", overloaded, Context()) == NotMoved("no worker takes it")
    assert (agent.moved, agent.stayed) == (0, 2)


async def test_a_request_that_gets_no_turn_stays_and_leaves_the_queue(scene: Scene) -> None:
    agent, client = scene.agent(turn_s=0.5), scene.client()
    receiver = next(r for r in scene.view.instances() if r.instance_id == "receiver")
    async with AsyncExitStack() as stack:
        for name in ("a", "b"):  # both slots
            held = await stack.enter_async_context(
                client.confirmed(receiver.address, Ask(name, "x", 10, 10), scene.digest, timeout_s=30, metadata=())
            )
            await held.turn()
        outcome = await agent.follow("only", scene.reply(), "r", ADVICE, Context())
        assert isinstance(outcome, NotMoved)
    await until_answered(lambda: is_unknown(scene, client, receiver))  # once the cancelled call has been heard of


async def is_unknown(scene: Scene, client: WorkerClient, receiver: InstanceRecord) -> bool:
    """Whether the receiver takes a bid for the request as one that it does not know."""
    again = Ask("r", "sender", 100, 100)
    answer = await client.ask(receiver, again, scene.digest, timeout_s=60, metadata=())
    return answer != "known_already"


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
    ) -> ReplyMoved | NotMoved:
        await present(on_started)()
        await self.arrived.wait()
        return ReplyMoved(1, 0.0, 0)


async def test_a_transfer_keeps_its_slot_however_long_it_takes(scene: Scene) -> None:
    """`turn_timeout_s` limits the wait for the start alone: the slot is taken as long as KV moves."""
    turn_s = 1.0
    agent, client, reply = scene.agent(turn_s=turn_s), scene.client(), scene.reply(SlowReply)
    reply.arrived = asyncio.Event()
    receiver = present(scene.view.find("receiver"))
    following = asyncio.create_task(agent.follow("only", reply, "r", ADVICE, Context()))

    async def known() -> bool:
        return not await is_unknown(scene, client, receiver)

    await until_answered(known)
    await asyncio.sleep(1.5 * turn_s)  # the limit that must not end it
    assert await known()
    assert not following.done()
    reply.arrived.set()
    assert isinstance(await following, ReplyMoved)
    await until_answered(lambda: is_unknown(scene, client, receiver))


async def test_a_sender_that_is_gone_moves_nothing(scene: Scene) -> None:
    outcome = await scene.agent().follow("only", scene.reply(), "r", ADVICE, Context())
    assert isinstance(outcome, NotMoved), "MigrateOut cannot reach the sender: the reply is the stream's business"


CARD = ModelCard("only", "m", "d", "torch", 1000, 10, 16, 4)


def worker(name: str, stage: int | None, to: int = 0) -> InstanceRecord:
    place = StagePlace(stage, 0, to) if stage is not None else None
    return InstanceRecord(name, Role.WORKER, "h:1", 1.0, 1, 3.0, model=CARD, place=place)


A, B, C, D = worker("a", 0, 100), worker("b", 0, 100), worker("c", 1, 300), worker("d", 2, 900)
NOWHERE = worker("n", None)


@pytest.mark.parametrize(
    ("reason", "tokens", "sender", "asked"),
    [
        (MoveReason.RANGE_CROSSED, 120, A, [C]),
        (MoveReason.RANGE_CROSSED, 400, A, [D]),
        (MoveReason.RANGE_CROSSED, 5000, C, [D]),
        (MoveReason.RANGE_CROSSED, 5000, D, []),
        (MoveReason.OVERLOADED, 50, A, [B]),
        (MoveReason.OVERLOADED, 50, C, []),
        (MoveReason.DRAINING, 50, A, [B]),
        (MoveReason.DRAINING, 250, C, [D]),
        (MoveReason.DRAINING, 2000, D, [C]),
    ],
)
def test_an_agent_asks_those_whom_the_advice_concerns(
    reason: MoveReason, tokens: int, sender: InstanceRecord, asked: list[InstanceRecord]
) -> None:
    assert candidates([A, B, C, D], sender, MoveAdvice(reason, tokens, tokens)) == asked


def test_without_stages_only_a_drain_has_candidates() -> None:
    others = [NOWHERE, worker("o", None)]
    assert candidates(others, NOWHERE, MoveAdvice(MoveReason.DRAINING, 50, 50)) == [others[1]]
    assert candidates(others, NOWHERE, MoveAdvice(MoveReason.OVERLOADED, 50, 50)) == []
    assert candidates(others, NOWHERE, MoveAdvice(MoveReason.RANGE_CROSSED, 50, 50)) == []
