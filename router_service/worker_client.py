"""Speaks WorkerService to one instance at a time."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from grpc import aio

from penstock.worker.v1 import worker_pb2 as pb
from penstock.worker.v1 import worker_pb2_grpc
from router_service.bidding import MoveAdvice, MoveReason
from services import errors
from services import proto_codec as common
from services.channels import ChannelPool
from services.domain.errors import Unavailable
from services.domain.requests import FinishReason, GenerationRequest, TokenFrame, TokenUsage

_MOVE_REASONS = {
    pb.MOVE_REASON_RANGE_CROSSED: MoveReason.RANGE_CROSSED,
    pb.MOVE_REASON_OVERLOADED: MoveReason.OVERLOADED,
    pb.MOVE_REASON_DRAINING: MoveReason.DRAINING,
}


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


WorkerEvent = WorkerAdmitted | WorkerDeclined | TokenFrame | MoveAdvice | WorkerFinished


class WorkerClient:
    """Generates at any worker by address; a worker that goes silent counts as gone."""

    def __init__(self, channels: ChannelPool, silence_s: float) -> None:
        self._channels, self._silence_s = channels, silence_s

    async def generate(
        self, address: str, request: GenerationRequest, *, timeout_s: float, metadata: tuple[tuple[str, str], ...]
    ) -> AsyncGenerator[WorkerEvent, None]:
        """The worker's events, heartbeats left out. Leaving the iteration cancels the call.

        Raises what the worker said, as one of our errors; Unavailable for a worker that broke off or went silent.
        """
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels.get(address))
        call = stub.Generate(_request_to_proto(request), timeout=timeout_s, metadata=metadata)
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    response = await call.read()
                if not isinstance(response, pb.GenerateResponse):  # EOF
                    raise Unavailable("the worker ended the stream in the middle")
                event = _event(response)
                if isinstance(event, WorkerFinished):
                    async with asyncio.timeout(self._silence_s):
                        await call.read()  # the end: the worker's side is over, not cancelled
                    yield event
                    return
                if event is not None:
                    yield event
        except TimeoutError:
            raise Unavailable(f"the worker was silent for {self._silence_s:g} s") from None
        except aio.AioRpcError as error:
            raise errors.from_rpc(error) from error
        finally:
            call.cancel()


def _request_to_proto(request: GenerationRequest) -> pb.GenerateRequest:
    made = pb.GenerateRequest(
        request_id=request.request_id,
        prompt=common.prompt_to_proto(request.prompt),
        sampling=common.sampling_to_proto(request.sampling),
        resume_token_ids=request.resume_token_ids,
        priority=request.priority,
    )
    if request.slo is not None:
        made.slo.CopyFrom(common.slo_to_proto(request.slo))
    return made


def _event(response: pb.GenerateResponse) -> WorkerEvent | None:
    match response.WhichOneof("event"):
        case "tokens":
            return common.frame_from_proto(response.tokens)
        case "admitted":
            told = response.admitted
            return WorkerAdmitted(
                told.service_class == pb.SERVICE_CLASS_STANDARD, told.prompt_tokens, told.max_output_tokens
            )
        case "declined":
            return WorkerDeclined(response.declined.reason)
        case "move_advice" if response.move_advice.reason in _MOVE_REASONS:
            advice = response.move_advice
            return MoveAdvice(_MOVE_REASONS[advice.reason], advice.sequence_tokens, advice.sender_buffered_tokens)
        case "finished":
            done = response.finished
            return WorkerFinished(
                common.finish_reason_from_proto(done.reason),
                common.usage_from_proto(done.usage),
                done.stop if done.HasField("stop") else None,
            )
        case _:
            return None  # heartbeats
