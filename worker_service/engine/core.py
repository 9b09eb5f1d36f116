"""The core of the built-in engines: plan a step, run it, read the results.

Scheduling, stop rules, text, verification and KV transfer are implemented here; a ModelRunner computes the steps: the torch
runner computes logits, the simulated one only takes time. Not thread-safe: one thread owns a core.
"""

import contextlib
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from services.clock import Clock
from services.domain.errors import AlreadyRunning, Overloaded, RequestFailed, invalid
from services.domain.instances import Load
from services.domain.randomness import DRAW, uniform
from services.domain.requests import (
    FinishReason,
    GenerationRequest,
    PositionLogprobs,
    SamplingParams,
    TokenFrame,
    TokenLogprob,
    TokenUsage,
)
from services.domain.slo import ReplyLengths
from worker_service.engine import reply_rules
from worker_service.engine.interface import (
    NOT_KEPT,
    Admitted,
    Declined,
    DraftDistribution,
    EngineEvent,
    Finished,
    LastBlocks,
    Verification,
)
from worker_service.engine.kv_transfer import KvTransfers
from worker_service.engine.proposals import Continuation, Proposals
from worker_service.engine.runner import ModelRunner, RawLogprobs, Row, RowResult
from worker_service.engine.throughput import PromptThroughput, Throughput
from worker_service.request_failures import request_failed
from worker_service.scheduling import (
    BatchLimits,
    BatchPolicy,
    BatchScheduler,
    BlockPool,
    Chunk,
    OutOfBlocks,
    Phase,
    Reservation,
    Sequence,
    SequenceSlo,
    StepPlan,
)
from worker_service.speculation import acceptance
from worker_service.text import ReplyText, Tokenizer

if TYPE_CHECKING:
    from worker_service.grammar.token_grammar import TokenGrammar


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """max_queued: limit on waiting requests; further ones are refused. The other fields are as in BatchLimits."""

    batch: BatchLimits
    max_queued: int
    max_context_tokens: int


@dataclass(slots=True)
class _Request:
    """The state of a request in addition to its sequence.

    declines: where its SLO cannot be kept it is declined. given, given_accepted: tokens that its own source proposed and that
        were verified, and those of them that stand. drafted, drafted_accepted: the same of drafting models.
    compute_s: its share of the time of the steps so far, by tokens.
    """

    sequence: Sequence
    text: ReplyText | None
    grammar: "TokenGrammar | None" = None
    draft: tuple[int, ...] = ()
    draft_masks: npt.NDArray[np.int32] | None = None
    distributions: tuple[DraftDistribution, ...] = ()
    results: list[RowResult] = field(default_factory=list)
    declines: bool = False
    given: int = 0
    given_accepted: int = 0
    compute_s: float = 0.0
    drafted: int = 0
    drafted_accepted: int = 0


StepOutput = EngineEvent | Verification | RequestFailed

PROBE = SamplingParams(temperature=0.0, max_output_tokens=1)


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
        self.runner, self.tokenizer, self.limits = runner, tokenizer, limits
        self.scheduler = BatchScheduler(limits.batch, pool, policy)
        self.transfers = KvTransfers(self.scheduler, runner)
        self.proposals = Proposals(tokenizer)
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._throughput = Throughput(clock.now())
        self._prompt_throughput = PromptThroughput()
        self._reply_lengths = ReplyLengths()
        self._decided: list[tuple[str, StepOutput]] = []  # answers that have not been returned yet
        self._in_step = False
        self.computing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """Entered while the runner computes a step: meanwhile `add` and `decide` may be called by another thread."""
        self.timer: Callable[[], float] = clock.now
        """Times steps, in seconds, for the drafter; where one thread computes them, its CPU time is the better measure."""
        self.steps = 0

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def add(
        self, request: GenerationRequest, prompt: list[int], grammar: "TokenGrammar | None" = None
    ) -> tuple[Admitted | None, Finished | None]:
        """Queue a request with the tokenized prompt `prompt`. A resumed reply that is already complete is Finished at once.

        A request that asks for an SLO has no Admitted yet: `decide` returns the answer, or else the next step.

        grammar: of the reply, behind its resumed tokens.

        Raises:
            PromptTooLong: The prompt leaves no room for a reply.
            AlreadyRunning: A request with this id is in the engine.
            Overloaded: The queue is full.
            InvalidRequest: The resumed tokens are invalid.
        """
        admitted, finished = self._add(request, prompt, None, grammar)
        assert not isinstance(admitted, Declined)
        return admitted, finished

    def enter(
        self,
        request: GenerationRequest,
        prompt: list[int],
        transfer_id: str,
        tokens: Seq[int],
        last: LastBlocks | None = None,
        grammar: "TokenGrammar | None" = None,
    ) -> tuple[Admitted | Declined | None, Finished | None]:
        """Start a request that arrived with its KV. `tokens`: all its tokens; the last one has no KV.

        Its SLO is decided on at once. Declined and Finished: it cannot be kept, and the request is not started.

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
            except BaseException:
                self.transfers.release(transfer_id)
                raise
            try:
                self.runner.write_blocks(blocks, last.data)
            except BaseException:
                self.transfers.release(transfer_id)
                raise
            finally:
                self.transfers.let_go(blocks)
        reservation = self.transfers.take(transfer_id)
        try:
            if list(tokens[: len(prompt)]) != prompt:
                raise invalid("token_ids", "must begin with the prompt of the request")
            resumed = replace(request, resume_token_ids=tuple(tokens[len(prompt) :]))
            admitted, finished = self._add(resumed, prompt, reservation, grammar)
        except BaseException:
            self.scheduler.release(reservation)
            raise
        if finished is not None and finished.reason is not FinishReason.DECLINED:  # it was never started
            self.scheduler.release(reservation)
        return admitted, finished

    def leave(self, request_id: str) -> None:
        """Remove a request that has moved to another engine; no error if it has ended."""
        if self._requests.pop(request_id, None) is not None:
            self.scheduler.finish(request_id, None)
            self.proposals.forget(request_id)

    def _add(
        self,
        request: GenerationRequest,
        prompt: list[int],
        reservation: Reservation | None,
        grammar: "TokenGrammar | None",
    ) -> tuple[Admitted | Declined | None, Finished | None]:
        if request.request_id in self._requests:
            raise AlreadyRunning(request.request_id)
        most = reply_rules.reply_room(request, prompt, self.limits.max_context_tokens, self.tokenizer)
        resumed = list(request.resume_token_ids)
        text = reply_rules.resumed_text(request, self.tokenizer)
        if resumed and (reason := self._end_reason(text, resumed[-1], len(resumed), most, request.sampling)):
            usage = TokenUsage(len(prompt), 0, len(resumed))
            return Admitted(len(prompt), most), Finished(reason, usage, text.stopped_by)
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
        added = _Request(sequence, text, grammar, declines=request.decline_unkept_slo)
        self._requests[request.request_id] = added
        if sequence.slo is None:
            return Admitted(len(prompt), most), None
        if reservation is None:
            return None, None
        self._decided += self._decisions()
        if not sequence.promised and added.declines:
            return Declined(NOT_KEPT), self._ended(added, FinishReason.DECLINED)
        return self._admitted(sequence), None

    def _requested_slo(self, request: GenerationRequest, most: int) -> SequenceSlo | None:
        """The SLO that a request asks of the policy, from now on; None if it asks for nothing or nothing is kept here."""
        if request.slo is None or not self.scheduler.policy.keeps_slos:
            return None
        predicted = self._reply_lengths.predict(len(request.resume_token_ids), most)
        return SequenceSlo.requested(request.slo, self._clock.now(), predicted)

    def decide(self) -> list[tuple[str, StepOutput]]:
        """Let the policy decide on the requests that ask for an SLO; return the answers.

        May be called while a step is computed (`computing`): the decision is then for the steps behind it.
        """
        decided, self._decided = self._decided, []
        return decided + self._decisions()

    def _decisions(self) -> list[tuple[str, StepOutput]]:
        outputs: list[tuple[str, StepOutput]] = []
        for sequence in self.scheduler.decide(self._clock.now(), during_step=self._in_step):
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
        return Admitted(sequence.prompt_tokens, sequence.max_output_tokens, best_effort=not sequence.promised)

    def add_verification(
        self,
        request_id: str,
        prefix: Seq[int],
        draft: Seq[int],
        sampling: SamplingParams,
        offset: int,
        distributions: Seq[DraftDistribution],
        grammar: "TokenGrammar | None" = None,
    ) -> None:
        """Queue a draft for verification; its Verification is the output of a later step.

        grammar: of the reply, behind its tokens before the draft.

        Raises:
            PromptTooLong: Prefix and draft exceed the context.
            AlreadyRunning: A request with this id is in the engine.
            Overloaded: The queue is full.
            InvalidRequest: The draft is invalid.
        """
        if request_id in self._requests:
            raise AlreadyRunning(request_id)
        context = self.limits.max_context_tokens
        reply_rules.check_draft(prefix, draft, offset, distributions, context, self.tokenizer.vocab_size)
        self._check_queue()
        prompt = list(prefix[: len(prefix) - offset])
        output = [*prefix[len(prefix) - offset :], *draft]
        sequence = Sequence(
            request_id, prompt, sampling, max_output_tokens=len(output), output=output, draft=len(draft)
        )
        masks = grammar.allowed_along(draft) if grammar is not None else None
        self.scheduler.add(sequence)
        self._requests[request_id] = _Request(sequence, None, grammar, tuple(draft), masks, tuple(distributions))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORTED) -> Finished | None:
        """End a request; None if it is unknown."""
        request = self._requests.get(request_id)
        return self._ended(request, reason) if request is not None else None

    def step(self, allocation: Mapping[str, int] | None = None) -> list[tuple[str, StepOutput]]:
        """Compute one step and return its outputs in order; none if nothing could be computed.

        An error caused by one request ends only that request: its last output is RequestFailed, and its resources are
        released. The other requests are computed in the same step.

        Raises:
            Exception: The runner cannot compute anything any more.
        """
        outputs = self.decide()
        plan = self.scheduler.plan_step(allocation, self._clock.now())
        if not plan.chunks:
            return outputs
        prompt_tokens = sum(c.count for c in plan.chunks if c.sequence.pending > 1)
        plan = self.proposals.added(plan, self.scheduler, allowed=allocation is None)
        computed: list[tuple[Chunk, RowResult]] = []
        errors: list[BaseException] = []
        begun_s, timed_s = self._clock.now(), self.timer()
        self._in_step = True
        try:
            results = self._compute(plan.chunks)
        finally:
            self._in_step = False
        step_s, timed_s = self._clock.now() - begun_s, self.timer() - timed_s
        self._prompt_throughput.add(prompt_tokens, step_s)
        token_s = step_s / sum(chunk.tokens for chunk in plan.chunks)
        for chunk in plan.chunks:
            self._requests[chunk.sequence.request_id].compute_s += token_s * chunk.tokens
        for chunk, result in results:
            error = result if isinstance(result, BaseException) else result.error
            if error is not None:
                errors.append(error)
                outputs.append(self._failed(chunk.sequence.request_id, error))
            elif isinstance(result, RowResult):
                computed.append((chunk, result))
        if not computed and not isinstance(errors[0], RequestFailed):
            self._check_runner(errors[0])
        continuations: dict[str, Continuation] = {}
        standing: list[tuple[Chunk, RowResult]] = []
        for chunk, result in computed:
            request = self._requests[chunk.sequence.request_id]
            try:
                if chunk.logits and request.text is not None:
                    continuations[chunk.sequence.request_id] = self._continuation(request, request.text, chunk, result)
            except BaseException as error:
                outputs.append(self._failed(chunk.sequence.request_id, error))
            else:
                standing.append((chunk, result))
        chunks = tuple(chunk for chunk, _ in standing)
        sampled = {request_id: continuation.tokens for request_id, continuation in continuations.items()}
        self.scheduler.commit(StepPlan(chunks), sampled, self._clock.now())
        self.steps += 1
        for chunk, result in standing:
            request = self._requests[chunk.sequence.request_id]
            continuation = continuations.get(chunk.sequence.request_id)
            try:
                if continuation is not None:
                    outputs += self._continued(request, continuation)
                elif chunk.logits:
                    outputs += self._verified(request, result)
            except BaseException as error:
                outputs.append(self._failed(chunk.sequence.request_id, error))
        self.proposals.observe(continuations, chunks, timed_s)
        self._throughput.add(sum(map(len, sampled.values())), self._clock.now())
        return outputs

    def load(self) -> Load:
        """The current load."""
        return Load(
            running_tokens=tuple(len(s.tokens) for s in self.scheduler.running),
            queued_tokens=tuple(len(s.tokens) for s in self.scheduler.waiting),
            free_kv_blocks=self.scheduler.pool.free,
            output_tokens_per_s=self._throughput.per_second(self._clock.now()),
            input_tokens=tuple(s.prompt_tokens for s in (*self.scheduler.running, *self.scheduler.waiting)),
            slo=self.scheduler.policy.headroom(self.scheduler, self._clock.now()),
            pending_tokens=sum(
                pending for s in (*self.scheduler.running, *self.scheduler.waiting) if (pending := s.pending) > 1
            ),
            prompt_tokens_per_s=self._prompt_throughput.per_second,
            drafting=self.proposals.drafting(),
        )

    def restart_throughput(self) -> None:
        """Restart the measurement of throughput and reply lengths, after tokens that belonged to no request."""
        self._reply_lengths = ReplyLengths()
        self._throughput.restart(self._clock.now())

    def _check_queue(self) -> None:
        if len(self.scheduler.waiting) >= self.limits.max_queued + (
            self.limits.batch.max_running - len(self.scheduler.running)
        ):
            rate = max(self.load().output_tokens_per_s, 1.0)
            remaining_tokens = min((s.max_output_tokens - s.output_tokens for s in self.scheduler.running), default=1)
            retry_s = min(10.0, max(0.1, remaining_tokens * max(1, len(self.scheduler.running)) / rate))
            raise Overloaded(f"{len(self.scheduler.waiting)} requests are already waiting here", retry_s)

    def _compute(self, chunks: Seq[Chunk]) -> list[tuple[Chunk, RowResult | BaseException]]:
        """Run a step. A chunk with proposed tokens that fails is run again without them, so no request fails for these."""
        results = list(zip(chunks, self._results(chunks), strict=True))
        failing = [
            (i, replace(chunk, logits=1, proposed=()))
            for i, (chunk, result) in enumerate(results)
            if chunk.proposed and (isinstance(result, BaseException) or result.error is not None)
        ]
        if failing:
            plain = [chunk for _, chunk in failing]
            for (i, chunk), result in zip(failing, self._results(plain), strict=True):
                self.proposals.failed(chunk.sequence.request_id)
                results[i] = chunk, result
        return results

    def _results(self, chunks: Seq[Chunk]) -> Seq[RowResult | BaseException]:
        """One result for each chunk. A row whose grammar fails is left out: only this row has an error."""
        rows: list[Row | BaseException] = []
        for chunk in chunks:
            try:
                rows.append(self._row(chunk))
            except RequestFailed as error:
                rows.append(error)
        results = iter(self._run([row for row in rows if isinstance(row, Row)]))
        return [next(results) if isinstance(row, Row) else row for row in rows]

    def _run(self, rows: Seq[Row]) -> Seq[RowResult | BaseException]:
        """Run rows. A step that fails is split, down to the single rows that fail."""
        if not rows:
            return []
        try:
            with self.computing():
                return self.runner.run(rows)
        except BaseException as error:
            if len(rows) == 1:
                return [error]
        half = len(rows) // 2
        return [*self._run(rows[:half]), *self._run(rows[half:])]

    def _failed(self, request_id: str, error: BaseException) -> tuple[str, RequestFailed]:
        """End a request that cannot be computed and release its resources."""
        self._requests.pop(request_id, None)
        self.scheduler.finish(request_id, FinishReason.ABORTED)
        self.proposals.forget(request_id)
        return request_id, error if isinstance(error, RequestFailed) else request_failed(request_id, error)

    def _check_runner(self, error: BaseException) -> None:
        """Check the runner after every row of a step has failed: raise `error` unless it can still compute a token.

        The token is written to a free block; without one, the next step decides.
        """
        try:
            blocks = self.scheduler.pool.take(1)
        except OutOfBlocks:
            return
        try:
            (result,) = self.runner.run([Row((0,), 0, blocks, 1, PROBE, 0)])
        except BaseException:
            raise error from None
        finally:
            self.scheduler.pool.release(blocks)
        if result.error is not None:
            raise error

    def _row(self, chunk: Chunk) -> Row:
        sequence = chunk.sequence
        end = chunk.start + chunk.count
        request = self._requests[sequence.request_id]
        offset = end + len(chunk.proposed) - chunk.logits + 1 - sequence.prompt_tokens
        allowed = None
        if chunk.logits and request.draft_masks is not None:
            first = offset - (sequence.output_tokens - len(request.draft))
            allowed = request.draft_masks[first : first + chunk.logits]
        elif chunk.logits and request.grammar is not None:
            allowed = (
                request.grammar.allowed_along(chunk.proposed) if chunk.proposed else request.grammar.allowed()[None]
            )
        return Row(
            tokens=[*sequence.tokens[chunk.start : end], *chunk.proposed],
            start=chunk.start,
            blocks=sequence.blocks,
            logits=chunk.logits,
            sampling=sequence.sampling,
            offset=offset,
            distributions=bool(request.distributions),
            allowed=allowed,
            output=[*sequence.tokens[sequence.prompt_tokens : end], *chunk.proposed]
            if sequence.sampling.penalizes
            else (),
        )

    def _continuation(self, request: _Request, text: ReplyText, chunk: Chunk, result: RowResult) -> Continuation:
        """The new tokens of a reply: proposed ones that the model draws as well, its own token behind them, no further than
        the reply's end."""
        sequence = request.sequence
        accepted, _ = acceptance.matching(chunk.proposed, result.tokens)
        emitted, reason, count = "", None, 0
        for count, token in enumerate(result.tokens[: accepted + 1], 1):
            if request.grammar is not None:
                request.grammar.take(token)
            emitted += text.push(token)
            output = sequence.output_tokens + count
            reason = self._end_reason(text, token, output, sequence.max_output_tokens, sequence.sampling)
            if reason is not None:
                emitted += text.finish()
                break
        if chunk.proposed and self.proposals.gave(sequence.request_id):
            request.given += len(chunk.proposed)
            request.given_accepted += min(accepted, count)
        elif chunk.proposed and self.proposals.drafted(sequence.request_id):
            request.drafted += len(chunk.proposed)
            request.drafted_accepted += min(accepted, count)
        tokens = result.tokens[:count]
        pairs = zip(tokens, result.logprobs, strict=False)  # without logprobs, there are none
        logprobs = tuple(self._logprobs(token, raw) for token, raw in pairs)
        return Continuation(tokens, min(accepted, count), emitted, logprobs, reason)

    def _continued(self, request: _Request, continuation: Continuation) -> list[tuple[str, StepOutput]]:
        """The events of a request whose sequence has its new tokens."""
        request_id, tokens = request.sequence.request_id, tuple(continuation.tokens)
        offset = request.sequence.output_tokens - len(tokens)
        frame = TokenFrame(offset, tokens, continuation.text, continuation.logprobs)
        events: list[tuple[str, StepOutput]] = [(request_id, frame)]
        if continuation.reason is not None:
            events.append((request_id, self._ended(request, continuation.reason)))
        return events

    def _end_reason(
        self, text: ReplyText, token: int, output: int, most: int, sampling: SamplingParams
    ) -> FinishReason | None:
        return reply_rules.end_reason(text, token, output, most, sampling, self.tokenizer)

    def _verified(self, request: _Request, result: RowResult) -> list[tuple[str, StepOutput]]:
        """Collect the results of a draft; decide when they are complete."""
        request.results.append(result)
        sequence = request.sequence
        if sequence.pending:
            return []
        own = [token for part in request.results for token in part.tokens]
        if request.distributions:
            target = np.concatenate([part.distributions for part in request.results if part.distributions is not None])
            first = sequence.output_tokens - len(request.draft)
            offsets = range(first, first + len(own))
            seed = sequence.sampling.seed or 0
            accepted, token = acceptance.rejection(
                request.draft,
                target,
                [(d.token_ids, d.probabilities) for d in request.distributions],
                np.array([uniform(seed, offset, DRAW + 1) for offset in offsets]),
                np.array([uniform(seed, offset, DRAW) for offset in offsets]),
            )
        else:
            accepted, token = acceptance.matching(request.draft, own)
        self._ended(request, FinishReason.STOP)
        return [(sequence.request_id, Verification(accepted, token))]

    def _logprobs(self, token: int, raw: RawLogprobs) -> PositionLogprobs:
        def one(token_id: int, value: float) -> TokenLogprob:
            return TokenLogprob(token_id, value, self.tokenizer.token_bytes(token_id))

        top = tuple(one(t, v) for t, v in zip(raw.top_ids, raw.top, strict=True))
        return PositionLogprobs(one(token, raw.chosen), top)

    def _ended(self, request: _Request, reason: FinishReason) -> Finished:
        sequence = request.sequence
        self.scheduler.finish(sequence.request_id, reason)
        if request.text is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._reply_lengths.add(sequence.output_tokens)
        del self._requests[sequence.request_id]
        self.proposals.forget(sequence.request_id)
        usage = TokenUsage(
            sequence.prompt_tokens,
            sequence.cached_prompt_tokens,
            sequence.output_tokens,
            request.given_accepted,
            request.given - request.given_accepted,
            request.compute_s,
        )
        stop = request.text.stopped_by if request.text is not None else None
        return Finished(reason, usage, stop, sequence.preemptions, request.drafted, request.drafted_accepted)
