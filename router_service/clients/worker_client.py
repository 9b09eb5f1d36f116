"""Calls of WorkerService."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from grpc import aio

from penstock.proto.common.v1 import common_pb2
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from router_service.clients.reply_multiplexer import MultiplexerPool
from services import errors
from services import proto_codec as common
from services.channels import ChannelPool
from services.domain.requests import Draft, FinishReason, GenerationRequest, TokenUsage
from services.domain.stages.advice import MoveAdvice
from services.domain.values import value_type
from services.event_streams import OnTokens


@value_type(frozen=True, slots=True)
class WorkerAdmitted:
    slo_kept: bool
    prompt_tokens: int
    max_output_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerDeclined:
    reason: str


@value_type(frozen=True, slots=True)
class WorkerFinished:
    reason: FinishReason
    usage: TokenUsage
    stop: str | None


@dataclass(frozen=True, slots=True)
class WorkerHandedOver:
    """The reply continues on another instance from output position `offset`. stall_s: only in the report of a move."""

    offset: int
    stall_s: float = 0.0


@value_type(frozen=True, slots=True)
class WorkerAlive:
    """A heartbeat."""


WorkerEvent = WorkerAdmitted | WorkerDeclined | MoveAdvice | WorkerAlive
"""What a worker sends before the end of a reply, except frames of tokens."""
WorkerEnd = WorkerFinished | WorkerHandedOver
"""The last event of a reply at one worker."""
OnWorkerEvent = Callable[[WorkerEvent], None]


@dataclass(frozen=True, slots=True)
class RoundCopied:
    """Totals of what a move has sent so far."""

    blocks: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerNotMoved:
    """busy: the source is sending another request; the move may be tried again."""

    reason: str
    busy: bool = False


MoveReport = RoundCopied | WorkerHandedOver | WorkerNotMoved


class WorkerClient:
    """Generates at any worker by address; a worker that sends nothing for `silence_s` counts as gone."""

    def __init__(self, channels: ChannelPool, multiplexers: MultiplexerPool, silence_s: float) -> None:
        self._channels, self._multiplexers, self._silence_s = channels, multiplexers, silence_s

    async def generate(
        self,
        address: str,
        request: GenerationRequest,
        *,
        timeout_s: float,
        metadata: tuple[tuple[str, str], ...],
        on_event: OnWorkerEvent,
        on_tokens: OnTokens,
        transfer_id: str = "",
    ) -> WorkerEnd:
        """Have a worker serve a request; return its last event. Cancelling cancels the reply.

        on_event, on_tokens: called with all events before it, in order (`ReplyMultiplexer.reply`).
        transfer_id: of the move by which the request comes to this worker.

        Raises:
            PenstockError: The worker's error; Unavailable for a worker whose connection broke or that was silent; what the
                callbacks raise.
        """
        end = await self._multiplexers.get(address).reply(
            lambda message: _write_request(request, transfer_id, message),
            timeout_s,
            dict(metadata),
            self._silence_s,
            lambda event: on_event(_event(event)),
            on_tokens,
        )
        return _end(end)

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
        """Have the worker at `address` move a request to the instance `target_id`.

        WorkerHandedOver or WorkerNotMoved is last.

        starving: the request is sent next. Leaving the iteration cancels the move if that is still possible.

        Raises:
            PenstockError: The worker's error.
        """
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels.get(address))
        request = pb.MigrateOutRequest(
            request_id=request_id, transfer_id=transfer_id, target_instance_id=target_id, starving=starving
        )
        call = stub.MigrateOut(request, timeout=timeout_s, metadata=metadata)
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


def _write_request(request: GenerationRequest, transfer_id: str, message: pb.GenerateRequest) -> None:
    """Write a request into an empty message."""
    message.request_id = request.request_id
    common.write_prompt(request.prompt, message.prompt)
    common.write_sampling(request.sampling, message.sampling)
    if request.resume_token_ids:
        message.resume_token_ids.extend(request.resume_token_ids)
    if request.priority:
        message.priority = request.priority
    if request.cache_salt:
        message.cache_salt = request.cache_salt
    if request.decline_unkept_slo:
        message.decline_unkept_slo = True
    if transfer_id:
        message.transfer_id = transfer_id
    if request.draft is not None:
        message.draft.CopyFrom(_draft_to_proto(request.draft))
    if request.output_interval_s is not None:
        common.write_duration(request.output_interval_s, message.output_interval)
    if request.slo is not None:
        message.slo.CopyFrom(common.slo_to_proto(request.slo))


def _draft_to_proto(draft: Draft) -> pb.Draft:
    if draft.token_ids:
        return pb.Draft(token_ids=common_pb2.TokenIds(ids=draft.token_ids), tokenizer_digest=draft.tokenizer_digest)
    return pb.Draft(text=draft.text)


def _event(response: pb.GenerateResponse) -> WorkerEvent:
    match response.WhichOneof("event"):
        case "admitted":
            admitted = response.admitted
            return WorkerAdmitted(
                admitted.service_class == pb.SERVICE_CLASS_STANDARD, admitted.prompt_tokens, admitted.max_output_tokens
            )
        case "declined":
            return WorkerDeclined(response.declined.reason)
        case "move_advice" if (advice := common.move_advice_from_proto(response.move_advice)) is not None:
            return advice
        case _:
            return WorkerAlive()  # heartbeats, and what later versions add


def _end(response: pb.GenerateResponse) -> WorkerEnd:
    if response.HasField("handed_over"):
        return WorkerHandedOver(response.handed_over.offset)
    finished = response.finished
    return WorkerFinished(
        common.finish_reason_from_proto(finished.reason),
        common.usage_from_proto(finished.usage),
        finished.stop if finished.HasField("stop") else None,
    )
