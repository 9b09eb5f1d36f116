"""The core of the built-in engines: plan a step, run it, read the results.

Scheduling, stop rules, text, verification and KV transfer are implemented here; a ModelRunner computes the steps: the torch
runner computes logits, the simulated one only takes time. Not thread-safe: one thread owns a core.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.services.clock import Clock
from penstock.services.domain.errors import AlreadyRunning, Overloaded, RequestFailed, invalid
from penstock.services.domain.instances import Load
from penstock.services.domain.slo.reply_length import ReplyLengths
from penstock.types.replies import FinishReason, TokenFrame, Usage
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import NO_DEFAULTS, SamplingDefaults
from penstock.types.workers import Admitted, Declined, EngineFinished
from penstock.worker_service.engine import reply_rules
from penstock.worker_service.engine.interface import NOT_KEPT, Capability, EngineEvent, EngineInfo, LastBlocks
from penstock.worker_service.engine.kv_transfer import KvTransfers
from penstock.worker_service.engine.proposals import Continuation, Proposals
from penstock.worker_service.engine.row_runner import RowRunner
from penstock.worker_service.engine.runner import ModelRunner, Row, RowResult
from penstock.worker_service.engine.running_request import RunningRequest
from penstock.worker_service.engine.throughput import PromptThroughput, Throughput
from penstock.worker_service.scheduling.batching import BatchLimits, BatchScheduler, Reservation
from penstock.worker_service.scheduling.blocks import BlockPool
from penstock.worker_service.scheduling.sequence import Phase, Sequence, SequenceSlo
from penstock.worker_service.scheduling.steps import BatchPolicy, Chunk, StepPlan
from penstock.worker_service.speculation.acceptance import matching
from penstock.worker_service.text.request_failures import request_failed
from penstock.worker_service.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.worker_service.grammar.token_grammar import TokenGrammar


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """max_queued: limit on waiting requests; further ones are refused. The other fields are as in BatchLimits."""

    batch: BatchLimits
    max_queued: int
    max_context_tokens: int


StepOutput = EngineEvent | RequestFailed
Answer = tuple[Admitted | Declined | None, EngineFinished | None]
"""To a request that is added. No Admitted: it comes with the decision on its SLO. EngineFinished: the reply has ended."""
Computed = tuple[Chunk, RowResult]


class EngineCore:
    """Processes requests into events, step by step."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        pool: BlockPool,
        limits: CoreLimits,
        clock: Clock,
        policy: BatchPolicy | None = None,
    ) -> None:
        self.tokenizer, self.limits = tokenizer, limits
        self.scheduler = BatchScheduler(limits.batch, pool, policy)
        self.transfers = KvTransfers(self.scheduler, runner)
        self.proposals = Proposals(tokenizer)
        self._clock = clock
        self._requests: dict[str, RunningRequest] = {}
        self._throughput = Throughput(clock.now())
        self._prompt_throughput = PromptThroughput()
        self._reply_lengths = ReplyLengths()
        self._decided: list[tuple[str, StepOutput]] = []  # answers that have not been returned yet
        self._in_step = False
        self.rows = RowRunner(runner, pool)
        """While it is `computing`, `add` and `decide` may be called by another thread."""
        self.timer: Callable[[], float] = clock.now
        """Times steps, in seconds, for the drafter; where one thread computes them, its CPU time is the better measure."""
        self.steps = 0

    @property
    def runner(self) -> ModelRunner:
        """Computes the rows of steps."""
        return self.rows.runner

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def add(
        self,
        request: GenerationRequest,
        prompt: list[int],
        grammar: "TokenGrammar | None" = None,
        reservation: Reservation | None = None,
    ) -> Answer:
        """Queue a request with the tokenized prompt `prompt`. A resumed reply that is already complete ends at once.

        A request that asks for an SLO has no Admitted yet: `decide` returns the answer, or else the next step.

        grammar: of the reply, after its resumed tokens. reservation: with the KV of all tokens but the last one; the request
            is decided on at once.

        Raises:
            PromptTooLong: The prompt leaves no room for a reply.
            AlreadyRunning: A request with this id is in the engine.
            Overloaded: The queue is full.
            InvalidRequest: The resumed tokens are invalid.
        """
        if request.request_id in self._requests:
            raise AlreadyRunning(request.request_id)
        most = reply_rules.reply_room(request, prompt, self.limits.max_context_tokens, self.tokenizer)
        resumed = list(request.resume_token_ids)
        text = reply_rules.resumed_text(request, self.tokenizer)
        if resumed and (
            reason := reply_rules.end_reason(text, resumed[-1], len(resumed), most, request.sampling, self.tokenizer)
        ):
            usage = Usage(len(prompt), 0, len(resumed))
            return Admitted(len(prompt), most), EngineFinished(reason, usage, text.stopped_by)
        sequence = Sequence(
            request.request_id,
            prompt,
            request.sampling,
            max_output_tokens=most,
            output=resumed,
            priority=request.priority,
            slo=self._requested_slo(request, most),
            cache_salt=request.cache_salt,
        )
        if reservation is None:
            self._check_queue()
            self.scheduler.add(sequence)
        else:
            try:
                self.scheduler.adopt(sequence, reservation, len(sequence.tokens) - 1)
            except ValueError as error:
                raise invalid("token_ids", str(error)) from None
        added = RunningRequest(sequence, text, grammar, declines=request.decline_unkept_slo)
        self._requests[request.request_id] = added
        if sequence.slo is None:
            return Admitted(len(prompt), most), None
        if reservation is None:
            return None, None
        self._decided += self._decisions()
        if not sequence.promised and added.declines:
            return Declined(NOT_KEPT), self._ended(added, FinishReason.DECLINED)
        return self._admitted(sequence), None

    def enter(
        self,
        request: GenerationRequest,
        prompt: list[int],
        transfer_id: str,
        tokens: Seq[int],
        last: LastBlocks | None = None,
        grammar: "TokenGrammar | None" = None,
    ) -> Answer:
        """Start a request that arrived with its KV. `tokens`: all its tokens; the last one has no KV.

        Its SLO is decided on at once. Declined and EngineFinished: it cannot be kept, and the request is not started.

        last: blocks that must still be written. The reservation is removed in any case.

        Raises:
            NotFound: There is no such transfer.
            PromptTooLong: The prompt leaves no room for a reply.
            AlreadyRunning: A request with this id is in the engine.
            Overloaded: There is no room for the last blocks.
            InvalidRequest: The tokens do not match the request or the number of blocks.
        """
        if last is not None:
            try:
                blocks = self.transfers.hold_reserved(transfer_id, last.first, len(last.data))
                try:
                    self.runner.write_blocks(blocks, last.data)
                finally:
                    self.transfers.let_go(blocks)
            except BaseException:
                self.transfers.release(transfer_id)
                raise
        reservation = self.transfers.take(transfer_id)
        try:
            if list(tokens[: len(prompt)]) != prompt:
                raise invalid("token_ids", "must begin with the prompt of the request")
            resumed = replace(request, resume_token_ids=tuple(tokens[len(prompt) :]))
            admitted, finished = self.add(resumed, prompt, grammar, reservation)
        except BaseException:
            self.scheduler.release(reservation)
            raise
        if finished is not None and finished.reason is not FinishReason.DECLINED:  # it was never started
            self.scheduler.release(reservation)
        return admitted, finished

    def info(self, engine: str, model: str, sampling_defaults: SamplingDefaults = NO_DEFAULTS) -> EngineInfo:
        """The core as an engine of this name, which serves a model of this name."""
        limits, pool = self.limits, self.scheduler.pool
        lacking = {Capability.SLO_PREDICTED, Capability.ADAPTER}
        if not self.scheduler.policy.keeps_slos:
            lacking.add(Capability.SLO)
        return EngineInfo(
            engine=engine,
            model=model,
            model_digest=self.runner.kv_layout.model_digest,
            max_context_tokens=limits.max_context_tokens,
            kv_blocks=pool.count,
            kv_block_tokens=pool.block_tokens,
            max_requests=limits.batch.max_running + limits.max_queued,
            capabilities=frozenset(Capability) - lacking,
            sampling_defaults=sampling_defaults,
        )

    def leave(self, request_id: str) -> None:
        """Remove a request that has moved to another engine; no error if it has ended."""
        if self._requests.pop(request_id, None) is not None:
            self.scheduler.finish(request_id)
            self.proposals.forget(request_id)

    def _requested_slo(self, request: GenerationRequest, most: int) -> SequenceSlo | None:
        """The SLO that a request asks of the policy, from now on; None if it asks for nothing or nothing is kept here."""
        if request.slo is None or not self.scheduler.policy.keeps_slos:
            return None
        predicted = self._reply_lengths.predict(len(request.resume_token_ids), most)
        again = self._reply_lengths.predict_after(predicted, most)
        return SequenceSlo.requested(request.slo, self._clock.now(), predicted, again)

    def decide(self) -> list[tuple[str, StepOutput]]:
        """Let the policy decide on the requests that ask for an SLO; return the answers.

        May be called while a step is computed (`computing`): the decision is then for the steps after it.
        """
        decided, self._decided = self._decided, []
        return decided + self._decisions()

    def _decisions(self) -> list[tuple[str, StepOutput]]:
        outputs: list[tuple[str, StepOutput]] = []
        for sequence in self.scheduler.policy.decide(self.scheduler, self._clock.now(), during_step=self._in_step):
            request = self._requests[sequence.request_id]
            if sequence.phase is Phase.RUNNING:  # it has moved in: `enter` answers
                continue
            if sequence.promised or not request.declines:
                outputs.append((sequence.request_id, self._admitted(sequence)))
            else:
                outputs.append((sequence.request_id, Declined(NOT_KEPT)))
                outputs.append((sequence.request_id, self._ended(request, FinishReason.DECLINED)))
        return outputs

    @staticmethod
    def _admitted(sequence: Sequence) -> Admitted:
        return Admitted(sequence.prompt_tokens, sequence.max_output_tokens, slo_kept=sequence.promised)

    def abort(self, request_id: str) -> EngineFinished | None:
        """End a request; None if it is unknown."""
        request = self._requests.get(request_id)
        return self._ended(request, FinishReason.ABORTED) if request is not None else None

    def step(self) -> list[tuple[str, StepOutput]]:
        """Compute one step and return its outputs in order; none if nothing could be computed.

        An error caused by one request ends only that request: its last output is RequestFailed, and its resources are
        released. The other requests are computed in the same step.

        Raises:
            Exception: The runner cannot compute anything any more.
        """
        outputs = self.decide()
        plan = self.scheduler.plan_step(self._clock.now())
        if not plan.chunks:
            return outputs
        prompt_tokens = sum(c.count for c in plan.chunks if c.sequence.pending > 1)
        plan = self.proposals.added(plan, self.scheduler)
        begun_s, timed_s = self._clock.now(), self.timer()
        self._in_step = True
        try:
            results = self._compute(plan.chunks)
        finally:
            self._in_step = False
        step_s, timed_s = self._clock.now() - begun_s, self.timer() - timed_s
        results = self._when_they_may_come(results, begun_s + step_s)
        self._prompt_throughput.add(prompt_tokens, step_s)
        rows = sum(chunk.tokens for chunk in plan.chunks)
        token_s = step_s / rows
        for chunk in plan.chunks:
            self._requests[chunk.sequence.request_id].compute_s += token_s * chunk.tokens
        continuations, chunks, errors = dict[str, Continuation](), list[Chunk](), list[BaseException]()
        for chunk, result in results:
            request_id, error = chunk.sequence.request_id, result.error
            if error is not None:
                errors.append(error)
            else:
                try:
                    if chunk.logits:
                        request = self._requests[request_id]
                        continuations[request_id] = request.continuation(chunk, result, self.tokenizer, self.proposals)
                    chunks.append(chunk)
                except BaseException as of_text:
                    error = of_text
            if error is not None:
                outputs.append(self._failed(request_id, error))
        if len(errors) == len(results) and not isinstance(errors[0], RequestFailed):
            self.rows.check(errors[0])
        sampled = {request_id: continuation.tokens for request_id, continuation in continuations.items()}
        self.scheduler.commit(StepPlan(tuple(chunks)), sampled, self._clock.now())
        self.steps += 1
        for request_id, continuation in continuations.items():
            try:
                outputs += self._continued(self._requests[request_id], continuation)
            except BaseException as error:
                outputs.append(self._failed(request_id, error))
        self.proposals.observe(continuations, chunks, rows, timed_s)
        self._throughput.add(sum(map(len, sampled.values())), self._clock.now())
        return outputs

    def load(self) -> Load:
        """The current load."""
        sequences = [*self.scheduler.running, *self.scheduler.waiting]
        return Load(
            running_tokens=tuple(len(s.tokens) for s in self.scheduler.running),
            queued_tokens=tuple(len(s.tokens) for s in self.scheduler.waiting),
            free_kv_blocks=self.scheduler.pool.free,
            output_tokens_per_s=self._throughput.per_second(self._clock.now()),
            input_tokens=tuple(s.prompt_tokens for s in sequences),
            slo=self.scheduler.policy.headroom(self.scheduler, self._clock.now()),
            pending_tokens=sum(pending for s in sequences if (pending := s.pending) > 1),
            prompt_tokens_per_s=self._prompt_throughput.per_second,
            drafting=self.proposals.drafting(),
        )

    def limit_steps(self, tokens: int) -> None:
        """Compute at most so many tokens in a step from now on. The core must be idle."""
        batch = replace(self.limits.batch, max_step_tokens=tokens)
        self.limits, self.scheduler.limits = replace(self.limits, batch=batch), batch

    def restart_throughput(self) -> None:
        """Restart the measurement of throughput and reply lengths, after tokens that belonged to no request."""
        self._reply_lengths = ReplyLengths()
        self._throughput.restart(self._clock.now())

    def _check_queue(self) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        if len(waiting) < self.limits.max_queued + self.limits.batch.max_running - len(running):
            return
        rate = max(self.load().output_tokens_per_s, 1.0)
        remaining_tokens = min((s.max_output_tokens - s.output_tokens for s in running), default=1)
        retry_s = min(10.0, max(0.1, remaining_tokens * max(1, len(running)) / rate))
        raise Overloaded(f"{len(waiting)} requests are already waiting here", retry_s)

    def _compute(self, chunks: Seq[Chunk]) -> list[Computed]:
        """Run a step. A chunk with proposed tokens that fails is run again without them, so no request fails for these."""
        results = list(zip(chunks, self._results(chunks), strict=True))
        failing = [
            (i, chunk.without_proposed())
            for i, (chunk, result) in enumerate(results)
            if chunk.proposed and result.error is not None
        ]
        for (i, chunk), result in zip(failing, self._results([chunk for _, chunk in failing]), strict=True):
            self.proposals.failed(chunk.sequence.request_id)
            results[i] = chunk, result
        return results

    def _when_they_may_come(self, results: list[Computed], computed_s: float) -> list[Computed]:
        """Wait until the policy lets the tokens of a step come; the results without accepted drafts where these may not."""
        accepted = {
            chunk.sequence.request_id: matching(chunk.proposed, result.tokens)[0]
            for chunk, result in results
            if chunk.proposed and result.error is None
        }
        may_end_s, drafts_come = self.scheduler.policy.may_end_s(self.scheduler, computed_s, accepted)
        if may_end_s > computed_s:
            self._clock.sleep(may_end_s - computed_s)
        return results if drafts_come else [(chunk.without_proposed(), result) for chunk, result in results]

    def _results(self, chunks: Seq[Chunk]) -> list[RowResult]:
        """One result for each chunk. A row whose grammar fails is left out: only this row has an error."""
        rows: list[Row | BaseException] = []
        for chunk in chunks:
            try:
                rows.append(self._requests[chunk.sequence.request_id].row(chunk))
            except RequestFailed as error:
                rows.append(error)
        return self.rows.run(rows)

    def _failed(self, request_id: str, error: BaseException) -> tuple[str, RequestFailed]:
        """End a request that cannot be computed and release its resources."""
        self._requests.pop(request_id, None)
        self.scheduler.finish(request_id)
        self.proposals.forget(request_id)
        return request_id, error if isinstance(error, RequestFailed) else request_failed(request_id, error)

    def _continued(self, request: RunningRequest, continuation: Continuation) -> list[tuple[str, StepOutput]]:
        """The events of a request whose sequence has its new tokens."""
        request_id, tokens = request.sequence.request_id, tuple(continuation.tokens)
        offset = request.sequence.output_tokens - len(tokens)
        frame = TokenFrame(offset, tokens, continuation.text, continuation.logprobs)
        events: list[tuple[str, StepOutput]] = [(request_id, frame)]
        if continuation.reason is not None:
            events.append((request_id, self._ended(request, continuation.reason)))
        return events

    def _ended(self, request: RunningRequest, reason: FinishReason) -> EngineFinished:
        sequence = request.sequence
        self.scheduler.finish(sequence.request_id)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._reply_lengths.add(sequence.output_tokens)
        del self._requests[sequence.request_id]
        self.proposals.forget(sequence.request_id)
        return request.ended(reason)
