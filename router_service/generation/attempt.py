"""One attempt at a reply: at one instance, and at those that the reply moves to from there."""

import asyncio
import contextvars
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode, Tracer

from router_service.clients.worker_client import WorkerAdmitted, WorkerClient, WorkerDeclined, WorkerEvent
from router_service.domain.events import TierAdmitted, TierDeclined
from router_service.generation.reply_assembler import ReplyAssembler
from router_service.migration.bidding import MoveAgent
from router_service.migration.movable_reply import MovableReply, Moved, NotMoved, WorkerChanged
from router_service.routing.instance_pool import InstancePool
from services import telemetry
from services.background import end
from services.domain.errors import DeadlineExceeded, PenstockError
from services.domain.instances import InstanceRecord
from services.domain.requests import MAX_REQUEST_ID_CHARS, FinishReason, GenerationRequest, TokenUsage
from services.domain.stages.advice import MoveAdvice

_METHOD = "penstock.worker.v1.WorkerService/Generate"  # the name of a reply in traces


@dataclass(frozen=True, slots=True)
class TierDone:
    """The reply is complete."""

    reason: FinishReason
    usage: TokenUsage
    stop: str | None


@dataclass(frozen=True, slots=True)
class AttemptServices:
    """What all attempts of a router use."""

    pool: InstancePool
    workers: WorkerClient
    agent: MoveAgent
    tracer: Tracer


class Attempt:
    """Passes what workers send to the reply's assembler, and has the reply move where its worker advises it."""

    def __init__(
        self,
        services: AttemptServices,
        record: InstanceRecord,
        request: GenerationRequest,
        assembler: ReplyAssembler,
        deadline_s: float,
        parent: Context,
        *,
        on_failure: Callable[[InstanceRecord, PenstockError], None],
        may_move: Callable[[], bool],
    ) -> None:
        """deadline_s: on the event loop's clock. parent: of the attempt's span. on_failure, may_move: see MovableReply."""
        self._services, self._assembler = services, assembler
        request = replace(
            request, request_id=attempt_id(request.request_id), resume_token_ids=tuple(assembler.token_ids)
        )
        self._request_id, self._deadline_s = request.request_id, deadline_s
        attributes: dict[str, str | int | float] = {
            "rpc.system": "grpc",
            "rpc.method": _METHOD,
            "server.address": record.address,
            "penstock.instance_id": record.instance_id,
            "penstock.offset": len(assembler.token_ids),
        }
        self._span = telemetry.child_span(services.tracer, _METHOD, attributes, parent=parent, kind=SpanKind.CLIENT)
        self._trace_context = telemetry.context_of(self._span, parent)
        self._context = contextvars.copy_context()  # of the request: events come in the context of the call's reader
        self._move: asyncio.Task[Moved | NotMoved] | None = None
        self.reply = MovableReply(
            services.workers,
            record,
            request,
            deadline_s,
            telemetry.inject(self._trace_context),
            on_event=self._take,
            on_tokens=assembler.take,
            on_failure=on_failure,
            may_move=may_move,
        )

    async def run(self) -> TierDone:
        """The reply, from the assembler's position to its end. Cancelling cancels it at the workers.

        Raises:
            PenstockError: The worker's error.
            DeadlineExceeded: The deadline passed.
        """
        try:
            if asyncio.get_running_loop().time() >= self._deadline_s:
                raise DeadlineExceeded("the deadline passed")
            with self._services.pool.sending(self.reply.record.instance_id) as self._sent:
                finished = await self.reply.run()
            self._assembler.begin()
            return TierDone(finished.reason, finished.usage, finished.stop)
        except PenstockError as error:
            self._span.set_status(StatusCode.ERROR, str(error))
            raise
        finally:
            if self._move is not None:
                await end(self._move)
            self._span.end()

    def _take(self, event: WorkerEvent | WorkerChanged) -> None:
        tier, instance_id = self._assembler.tier, self._assembler.instance_id
        match event:
            case WorkerAdmitted():
                self._assembler.admitted(
                    TierAdmitted(tier, instance_id, event.slo_kept, event.prompt_tokens, event.max_output_tokens)
                )
            case WorkerDeclined():
                self._assembler.declined(TierDeclined(tier, instance_id, event.reason))
            case MoveAdvice() if self._move is None or self._move.done():
                follow = self._services.agent.follow(tier, self.reply, self._request_id, event, self._trace_context)
                self._move = asyncio.get_running_loop().create_task(follow, name="move", context=self._context)
            case WorkerChanged():
                target_id = event.record.instance_id
                self._sent.move(target_id)
                offset = len(self._assembler.token_ids)
                self._span.add_event("moved", {"penstock.to": target_id, "penstock.offset": offset})
                self._assembler.moved(target_id, event.why)


def attempt_id(reply_id: str) -> str:
    """The id of one attempt at a reply, at its worker and those that the attempt moves to.

    No other attempt has it, of this router or another: an attempt whose end has not reached its worker yet does not block the
    next one. It begins with the reply's id, truncated to the largest length of an id.
    """
    suffix = f":{secrets.token_hex(6)}"
    return f"{reply_id[: MAX_REQUEST_ID_CHARS - len(suffix)]}{suffix}"
