"""A gRPC server that speaks a worker's GenerateMany by a script: for failures that no healthy worker can be made to have."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum

import grpc
from grpc import aio

from penstock.proto.common.v1 import common_pb2
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.services import errors
from penstock.services.channels import server_options
from penstock.services.domain.errors import PenstockError, Unavailable
from penstock.services.domain.instances import InstanceRecord, Load, ModelCard, Role, SloHeadroom
from penstock.services.grpc_types import Context

PLACES = 16


class Act(Enum):
    """What a worker may do to a reply besides saying so many tokens, or an error."""

    DIE = "die"
    """Its connections break."""
    BREAK_CALL = "break the shared call"
    """With the status `broken_by`."""
    HAND_OVER = "hand over"
    """At the next MigrateOut."""
    ADVISE_MOVE = "advise a move"
    """The sequence has outgrown the instance."""
    SKIP_A_TOKEN = "skip a token"
    DECLINE = "decline"
    """Its SLO cannot be kept."""
    ABORT = "abort"
    FINISH = "finish"


Script = Sequence[int | Act | PenstockError | asyncio.Event]  # an event is waited for
WHOLE: Script = (1000, Act.FINISH)


def _events(act: Act, offset: int) -> list[dict[str, object]]:
    """What an act says that is nothing but events of the reply."""
    match act:
        case Act.ADVISE_MOVE:
            return [{"move_advice": pb.MoveAdvice(reason=pb.MOVE_REASON_RANGE_CROSSED, tokens=offset + 3)}]
        case Act.SKIP_A_TOKEN:
            return [{"tokens": common_pb2.TokenFrame(offset=offset + 1, token_ids=[0], text="?")}]
        case Act.DECLINE:
            declined = pb.Declined(reason="the SLO cannot be kept here")
            finished = pb.EngineFinished(reason=common_pb2.FINISH_REASON_DECLINED)
            return [{"declined": declined}, {"finished": finished}]
    reason = common_pb2.FINISH_REASON_ABORTED if act is Act.ABORT else common_pb2.FINISH_REASON_LENGTH
    usage = common_pb2.Usage(prompt_tokens=3, output_tokens=offset)
    return [{"finished": pb.EngineFinished(reason=reason, usage=usage)}]


@dataclass
class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Plays one script for each request, in order; without one it says the whole reply."""

    name: str
    scripts: deque[Script] = field(default_factory=deque)
    asked: list[pb.GenerateRequest] = field(default_factory=list)
    port: int = 0
    requests: int = 0
    """What its record tells of its load."""
    tier: str = "only"
    keeps_slos: bool = True
    """Whether it admits requests with an SLO as standard, or as best effort."""
    headroom: SloHeadroom | None = None
    tokenizer_digest: str = ""
    takes_drafts: bool = False
    broken_by: grpc.Status = field(default_factory=lambda: errors.to_status(Unavailable("the call is broken")))
    received: Callable[[str], int] | None = None
    """How many tokens of a request its caller has read: a death comes after all that were said, which gRPC may drop else."""
    server: aio.Server = field(init=False)

    @property
    def record(self) -> InstanceRecord:
        card = ModelCard(
            self.tier,
            "m",
            "d",
            "scripted",
            4096,
            10,
            16,
            PLACES,
            tokenizer_digest=self.tokenizer_digest,
            takes_drafts=self.takes_drafts,
        )
        load = Load((1,) * self.requests, (), 9, 1.0, slo=self.headroom)
        return InstanceRecord(self.name, Role.WORKER, f"127.0.0.1:{self.port}", 1.0, 1, 9.0, model=card, load=load)

    async def GenerateMany(
        self, request_iterator: AsyncIterator[pb.GenerateManyRequest], context: Context
    ) -> AsyncIterator[pb.GenerateManyResponse]:
        said: asyncio.Queue[pb.ReplyEvent | None] = asyncio.Queue()
        tasks: list[asyncio.Task[None]] = []

        async def listen() -> None:
            async for message in request_iterator:
                for step in message.steps:
                    if step.HasField("start"):
                        self.asked.append(step.start.request)
                        script = self.scripts.popleft() if self.scripts else WHOLE
                        tasks.append(asyncio.create_task(self._play(step.reply_id, step.start.request, script, said)))

        tasks.append(asyncio.create_task(listen()))
        try:
            while (event := await said.get()) is not None:
                yield pb.GenerateManyResponse(events=[event])
            await context.abort_with_status(self.broken_by)
        finally:
            for task in tasks:
                task.cancel()

    async def MigrateOut(self, request: pb.MigrateOutRequest, context: Context) -> AsyncIterator[pb.MigrateOutResponse]:
        assert any(asked.request_id == request.request_id for asked in self.asked)
        self._moved.set()
        await self._handing_over.wait()
        yield pb.MigrateOutResponse(handed_over=pb.HandedOver(offset=self._offset))

    async def _play(
        self, reply_id: int, request: pb.GenerateRequest, script: Script, said: "asyncio.Queue[pb.ReplyEvent | None]"
    ) -> None:
        def say(**event: object) -> None:
            said.put_nowait(pb.ReplyEvent(reply_id=reply_id, event=pb.GenerateResponse(**event)))  # type: ignore[arg-type]

        most, offset = request.sampling.max_tokens, len(request.resume_token_ids)
        if request.transfer_id:
            say(alive=pb.Alive())
            if script[0] is not Act.DIE:
                offset = await self.transferred
        if isinstance(script[0], int):
            admitted = pb.Admitted(prompt_tokens=3, max_output_tokens=most)
            if request.HasField("slo"):
                admitted.slo_kept = self.keeps_slos
            say(admitted=admitted)
        for act in script:
            match act:
                case int():
                    for _ in range(min(act, most - offset)):
                        say(tokens=common_pb2.TokenFrame(offset=offset, token_ids=[offset], text=f"{offset} "))
                        offset += 1
                case asyncio.Event():
                    await act.wait()
                case PenstockError():
                    failure = errors.to_proto(act).SerializeToString()
                    said.put_nowait(pb.ReplyEvent(reply_id=reply_id, failure=failure))
                case Act.DIE:
                    await self._die(said, request.request_id, offset if isinstance(script[0], int) else 0)
                case Act.BREAK_CALL:
                    said.put_nowait(None)
                case Act.HAND_OVER:
                    self._offset = offset
                    await self._moved.wait()
                    self._handing_over.set()
                    say(handed_over=pb.HandedOver(offset=offset))
                case _:
                    for event in _events(act, offset):
                        say(**event)

    async def _die(self, said: "asyncio.Queue[pb.ReplyEvent | None]", request_id: str, offset: int) -> None:
        await asyncio.sleep(0)
        while self.received and offset and self.received(request_id) < offset:
            await asyncio.sleep(0)
        while not said.empty():  # what it has said before leaves first
            await asyncio.sleep(0)
        self._death = asyncio.create_task(self.server.stop(None))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["ScriptedWorker"]:
        self._moved, self._handing_over, self._offset = asyncio.Event(), asyncio.Event(), 0
        self.transferred: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.server = aio.server(options=server_options(Role.WORKER))
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()
        try:
            yield self
        finally:
            await self.server.stop(None)
