"""One request from its arrival to its end: admission, the cascade, and what is recorded of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from opentelemetry.trace import format_trace_id

from penstock.router_service.admission.admission_queue import AdmissionQueue
from penstock.router_service.admission.rules import Ticket
from penstock.router_service.domain.events import RequestOutput, RouterEvent, RouterRequest
from penstock.router_service.generation.cascade_generation import CascadeGeneration
from penstock.router_service.generation.live_requests import LiveRequests
from penstock.router_service.generation.tier_answer import OnAnswer, TierAnswer, offers_tools
from penstock.router_service.telemetry.late_traces import LateTraces, PastRequest
from penstock.router_service.telemetry.stats import RouterStats
from penstock.services import telemetry
from penstock.services.domain.errors import AlreadyRunning, DeadlineExceeded, Overloaded, PenstockError
from penstock.services.tool_calls.formats import FORMATS
from penstock.services.tool_calls.parser import parse_reply
from penstock.types.events import Finished
from penstock.types.prompts import ChatPrompt


class RequestDriver:
    """Drives all requests of a router. Its only state of a request is the id, while it is active."""

    def __init__(
        self, cascade: CascadeGeneration, queue: AdmissionQueue, stats: RouterStats, late_traces: LateTraces
    ) -> None:
        self._cascade, self._queue, self._stats, self._late_traces = cascade, queue, stats, late_traces
        self._live = LiveRequests()
        self.arrived: Callable[[RouterRequest], None] = lambda _: None
        """Called with each admitted request."""
        self.recorders: list[Callable[[RouterRequest, Finished], None]] = []
        """Called with each request that has finished and was not declined."""

    def refusal(self) -> Overloaded | None:
        """The error for a request that arrives now if it would be refused, whatever it is; the refusal is counted."""
        error = self._queue.refusal()
        if error is not None:
            self._stats.rejection()
        return error

    async def drive(self, request: RouterRequest, output: RequestOutput) -> Finished:
        """Admit one request and run it. Raises as `admitted` and `run` do."""
        async with self.admitted([request]) as ticket:
            return await self.run(request, ticket, output)

    @asynccontextmanager
    async def admitted(
        self, requests: Sequence[RouterRequest], on_wait: Callable[[], None] | None = None
    ) -> AsyncIterator[Ticket]:
        """Wait until requests that belong together, of one priority and deadline, may run: all of them or none.

        on_wait: called once if they are queued.

        Entering it raises:
            AlreadyRunning: A request with one of these ids is active here, and this one does not resume it.
            InvalidRequest: They are more than can ever run at once; names `n`.
            Overloaded: The queue is full.
            DeadlineExceeded: The deadline passed while waiting.
        """
        priority, deadline_s = requests[0].priority, requests[0].deadline_s
        async with AsyncExitStack() as held:
            try:
                for request in requests:
                    held.enter_context(self._live.entered(request.request_id, resumes=request.resume is not None))
                waiting = self._queue.entered(priority, deadline_s, len(requests), on_wait)
                ticket = await held.enter_async_context(waiting)
            except (AlreadyRunning, Overloaded, DeadlineExceeded) as error:
                for request in requests:
                    self._count(request, error)
                raise
            yield ticket

    async def run(self, request: RouterRequest, ticket: Ticket, output: RequestOutput) -> Finished:
        """Run an admitted request: pass its events and its answer to `output`; return the last event, which is passed, too.

        Cancelling cancels everything within a step. One place of the ticket is given back when `output` has been sent.

        Raises:
            NotFound: There is no such model.
            InvalidRequest, RequestFailed: A tier cannot serve the request.
            PoisonRequest: Instances died while they worked on it.
            Overloaded, Unavailable, DeadlineExceeded: The mesh cannot serve it now, or not in time.
        """
        loop = asyncio.get_running_loop()
        self.arrived(request)
        answers, began_s, traced = list[TierAnswer](), loop.time(), telemetry.is_traced()
        finished: Finished | None = None

        def past() -> PastRequest:
            tiers = [answer.past() for answer in answers]
            return PastRequest(request.request_id, request.model, began_s, loop.time(), tiers)

        try:
            counted = _CountedOutput(output, self._stats, request.model)
            answer = await self._cascade.generate(request, counted, answers)
            total_s, trace_id = loop.time() - began_s, ""
            if traced:
                trace_id = format_trace_id(answer.span.get_span_context().trace_id)
            else:
                trace_id = self._late_traces.ended(total_s, past)
            finished = _finished(request, answer, answers, began_s, total_s, trace_id)
            for record in () if answer.declined else self.recorders:
                record(request, finished)
            counted.event(finished)
            await output.sent()
            return finished
        except asyncio.CancelledError:  # the client left, or its deadline passed
            if finished is None:
                self._stats.cancellation(request.model)
                if not traced:
                    self._late_traces.ended(loop.time() - began_s, past)
            raise
        except Exception as error:
            if isinstance(error, PenstockError):
                self._count(request, error)
            if answers and answers[-1].promise is not None and answers[-1].promise.promised:
                self._stats.promise_broken(answers[-1].tier.name)
            if not traced:
                self._late_traces.failed(past, error)
            raise
        finally:
            self._queue.leave_one(ticket)

    def _count(self, request: RouterRequest, error: PenstockError) -> None:
        if isinstance(error, Overloaded):
            self._stats.rejection()
        else:
            self._stats.failure(request.model, error.reason.lower())


class _CountedOutput:
    """Counts the events of a request on their way to its client."""

    __slots__ = ("_model", "_output", "_stats", "answer", "sent")

    def __init__(self, output: RequestOutput, stats: RouterStats, model: str) -> None:
        self._output, self._stats, self._model = output, stats, model
        self.answer: OnAnswer = output.answer
        self.sent = output.sent

    def event(self, event: RouterEvent) -> None:
        self._stats.saw(event, self._model)
        self._output.event(event)


def _finished(
    request: RouterRequest,
    answer: TierAnswer,
    answers: Sequence[TierAnswer],
    began_s: float,
    total_s: float,
    trace_id: str,
) -> Finished:
    """The last event. answer: the accepted one of `answers`. trace_id: empty if there is no trace."""
    assert answer.done is not None
    form, parsed = FORMATS.get(answer.tool_format), None
    if isinstance(request.prompt, ChatPrompt) and offers_tools(request) and form is not None:
        parsed = parse_reply(answer.content, form, request.request_id, request.prompt)
    return Finished(
        reason=answer.done.reason,
        tier=answer.tier.name,
        usage=answer.usage(),
        tiers=tuple(each.summary() for each in answers),
        ttft_s=answer.answered_at - began_s if answer.answered_at is not None else None,
        total_s=total_s,
        trace_id=trace_id,
        stop=answer.done.stop,
        tool_calls=parsed.calls if parsed is not None else (),
        content=parsed.content if parsed is not None else None,
        slo=answer.slo_result(request.promise.first_token_due_s if request.promise is not None else None),
        predicted=answer.predicted,
    )
