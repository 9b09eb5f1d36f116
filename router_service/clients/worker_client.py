"""Speaks WorkerService to one instance at a time."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from grpc import aio

from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from router_service.clients.reply_multiplexer import MultiplexerPool
from services import errors
from services import proto_codec as common
from services.channels import ChannelPool
from services.domain.requests import FinishReason, GenerationRequest, TokenFrame, TokenUsage
from services.domain.stages.advice import MoveAdvice
from services.event_streams import OnTokens


@dataclass(frozen=True, slots=True)
class WorkerAdmitted:
    slo_kept: bool
    prompt_tokens: int
    max_output_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerDeclined:
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerFinished:
    reason: FinishReason
    usage: TokenUsage
    stop: str | None


@dataclass(frozen=True, slots=True)
class WorkerHandedOver:
    """The reply goes on elsewhere, from output position `offset` on. stall_s: only where a move is reported on."""

    offset: int
    stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerAlive:
    """Nothing to say."""


WorkerEvent = (
    WorkerAdmitted | WorkerDeclined | TokenFrame | MoveAdvice | WorkerFinished | WorkerHandedOver | WorkerAlive
)


@dataclass(frozen=True, slots=True)
class RoundCopied:
    """Totals of what a move has sent."""

    blocks: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerNotMoved:
    """busy: the source sends another request; this one may be tried again."""

    reason: str
    busy: bool = False


MoveReport = RoundCopied | WorkerHandedOver | WorkerNotMoved


class WorkerClient:
    """Generates at any worker by address; a worker that goes silent counts as gone."""

    def __init__(self, channels: ChannelPool, sessions: MultiplexerPool, silence_s: float) -> None:
        self._channels, self._sessions, self._silence_s = channels, sessions, silence_s

    async def generate(
        self,
        address: str,
        request: GenerationRequest,
        *,
        timeout_s: float,
        metadata: tuple[tuple[str, str], ...],
        transfer_id: str = "",
        on_tokens: OnTokens | None = None,
    ) -> AsyncGenerator[WorkerEvent, None]:
        """The worker's events. Leaving the iteration cancels the reply.

        transfer_id: the request comes there by a move. on_tokens: takes the frames of tokens, each behind all events before
        it; without it they are iterated.

        Raises:
            PenstockError: The worker's error; Unavailable for a worker that broke off or went silent.
        """
        message = _request_to_proto(request, transfer_id)
        reply = self._sessions.get(address).reply(message, timeout_s, dict(metadata), self._silence_s, on_tokens)
        async with aclosing(reply) as responses:
            async for response in responses:
                event = response if isinstance(response, TokenFrame) else _event(response)
                yield event
                if isinstance(event, (WorkerFinished, WorkerHandedOver)):
                    return

    async def migrate_out(
        self,
        address: str,
        request_id: str,
        transfer_id: str,
        target_id: str,
        *,
        starving: bool,
        timeout_s: float,
        metadata: tuple[tuple[str, str], ...],
    ) -> AsyncGenerator[MoveReport, None]:
        """Have the worker at `address` move a request to the instance `target_id`; starving: it is next.

        WorkerHandedOver or WorkerNotMoved is last.

        Leaving the iteration calls the move off, where that is still possible. Raises what the worker said.
        """
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels.get(address))
        asked = pb.MigrateOutRequest(
            request_id=request_id, transfer_id=transfer_id, target_instance_id=target_id, starving=starving
        )
        call = stub.MigrateOut(asked, timeout=timeout_s, metadata=metadata)
        try:
            while isinstance(response := await call.read(), pb.MigrateOutResponse):
                yield _report(response)
        except aio.AioRpcError as error:
            raise errors.from_rpc(error) from error
        finally:
            call.cancel()


def _report(response: pb.MigrateOutResponse) -> MoveReport:
    match response.WhichOneof("event"):
        case "round_copied":
            return RoundCopied(response.round_copied.blocks, response.round_copied.sent_bytes)
        case "handed_over":
            return WorkerHandedOver(response.handed_over.offset, common.seconds(response.handed_over.stall))
        case _:
            return WorkerNotMoved(response.transfer_failed.reason, response.transfer_failed.busy)


def _request_to_proto(request: GenerationRequest, transfer_id: str) -> pb.GenerateRequest:
    made = pb.GenerateRequest(
        request_id=request.request_id,
        prompt=common.prompt_to_proto(request.prompt),
        sampling=common.sampling_to_proto(request.sampling),
        resume_token_ids=request.resume_token_ids,
        priority=request.priority,
        transfer_id=transfer_id or None,
    )
    if request.output_interval_s is not None:
        made.output_interval.CopyFrom(common.duration(request.output_interval_s))
    if request.slo is not None:
        made.slo.CopyFrom(common.slo_to_proto(request.slo))
    return made


def _event(response: pb.GenerateResponse) -> WorkerEvent:
    match response.WhichOneof("event"):
        case "admitted":
            told = response.admitted
            return WorkerAdmitted(
                told.service_class == pb.SERVICE_CLASS_STANDARD, told.prompt_tokens, told.max_output_tokens
            )
        case "declined":
            return WorkerDeclined(response.declined.reason)
        case "move_advice" if (advice := common.move_advice_from_proto(response.move_advice)) is not None:
            return advice
        case "finished":
            done = response.finished
            return WorkerFinished(
                common.finish_reason_from_proto(done.reason),
                common.usage_from_proto(done.usage),
                done.stop if done.HasField("stop") else None,
            )
        case "handed_over":
            return WorkerHandedOver(response.handed_over.offset)
        case _:
            return WorkerAlive()  # heartbeats
