"""The heart of our engines: plan a step, run it, read it.

Scheduling, stop rules, text, verification and KV transfer are here, once; what a step computes is a ModelRunner's
business: the torch runner computes logits, the simulated one only time. Not thread-safe: one thread owns a core.
"""

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.clock import Clock
from services.domain.errors import AlreadyRunning, NotFound, Overloaded, invalid
from services.domain.instances import Load
from services.domain.requests import (
    FinishReason,
    GenerationRequest,
    PositionLogprobs,
    SamplingParams,
    TokenFrame,
    TokenLogprob,
    TokenUsage,
)
from worker_service.engine import reply_rules
from worker_service.engine.interface import (
    Admitted,
    DraftDistribution,
    EngineEvent,
    Finished,
    KvBlocks,
    KvLayout,
    Verification,
)
from worker_service.engine.randomness import DRAW, uniform
from worker_service.scheduling import BatchLimits, BatchScheduler, BlockPool, Chunk, OutOfBlocks, Sequence
from worker_service.speculation import acceptance
from worker_service.text import ReplyText, Tokenizer

THROUGHPUT_WINDOW_S = 5.0


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: compute `tokens` (from position `start` on) into `blocks`.

    logits: the last so many tokens want a next token each. offset: output position of the first of these.
    distributions: they also want the distribution they are drawn from.
    """

    tokens: Seq[int]
    start: int
    blocks: Seq[int]
    logits: int
    sampling: SamplingParams
    offset: int
    distributions: bool = False


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """At one position: the chosen token's logprob, and the likeliest tokens with theirs."""

    chosen: float
    top_ids: Seq[int] = ()
    top: Seq[float] = ()


@dataclass(frozen=True, slots=True)
class RowResult:
    """Per position that wanted logits: the next token; logprobs where asked for; distributions (positions, V) likewise."""

    tokens: Seq[int] = ()
    logprobs: Seq[RawLogprobs] = ()
    distributions: npt.NDArray[np.float32] | None = None


class ModelRunner(Protocol):
    """Runs steps of one model over one pool of KV blocks."""

    @property
    def kv_layout(self) -> KvLayout: ...

    def run(self, rows: Seq[Row]) -> list[RowResult]:
        """Compute a step; one result per row."""
        ...

    def read_blocks(self, blocks: Seq[int]) -> npt.NDArray[np.generic]:
        """A copy of blocks: (blocks, layers, 2, block_tokens, kv_heads, head_dim)."""
        ...

    def write_blocks(self, blocks: Seq[int], data: npt.NDArray[np.generic]) -> None: ...


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """max_queued: requests waiting; one more is Overloaded. The rest as in BatchLimits."""

    batch: BatchLimits
    max_queued: int
    max_context_tokens: int


@dataclass(slots=True)
class _Request:
    """What the core keeps beside a sequence."""

    sequence: Sequence
    text: ReplyText | None
    draft: tuple[int, ...] = ()
    distributions: tuple[DraftDistribution, ...] = ()
    results: list[RowResult] = field(default_factory=list)


StepOutput = EngineEvent | Verification


class EngineCore:
    """Requests in, events out, one step at a time."""

    def __init__(
        self, runner: ModelRunner, tokenizer: Tokenizer, pool: BlockPool, limits: CoreLimits, clock: Clock
    ) -> None:
        self.runner, self.tokenizer, self.limits = runner, tokenizer, limits
        self.scheduler = BatchScheduler(limits.batch, pool)
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._produced: deque[tuple[float, int]] = deque()
        self._began = clock.now()
        self.steps = 0

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def add(
        self, request: GenerationRequest, prompt: list[int], kv: KvBlocks | None = None
    ) -> tuple[Admitted, Finished | None]:
        """Queue a request whose prompt is `prompt`; with `kv` it starts at once behind the tokens whose KV it brings.

        A resumed reply that was complete already is Finished at once and never queued.
        PromptTooLong, AlreadyRunning, Overloaded, InvalidRequest (kv or resumed tokens that do not fit).
        """
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
        )
        if kv is None:
            self._check_queue()
            self.scheduler.add(sequence)
        else:
            self._adopt(sequence, kv)
        self._requests[request.request_id] = _Request(sequence, text)
        return Admitted(len(prompt), most), None

    def add_verification(
        self,
        request_id: str,
        prefix: Seq[int],
        draft: Seq[int],
        sampling: SamplingParams,
        offset: int,
        distributions: Seq[DraftDistribution],
    ) -> None:
        """Queue a draft for verification; its Verification comes out of a later step.

        PromptTooLong, AlreadyRunning, Overloaded, InvalidRequest.
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
        self.scheduler.add(sequence)
        self._requests[request_id] = _Request(sequence, None, tuple(draft), tuple(distributions))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORTED) -> Finished | None:
        """End a request now; None if it is not here."""
        request = self._requests.get(request_id)
        return self._ended(request, reason) if request is not None else None

    def step(self, allocation: Mapping[str, int] | None = None) -> list[tuple[str, StepOutput]]:
        """Compute one step and return what came of it, in order; nothing where nothing could be computed."""
        plan = self.scheduler.plan_step(allocation)
        if not plan.chunks:
            return []
        results = self.runner.run([self._row(chunk) for chunk in plan.chunks])
        sampled = {
            chunk.sequence.request_id: result.tokens
            for chunk, result in zip(plan.chunks, results, strict=True)
            if chunk.logits and not chunk.sequence.draft
        }
        self.scheduler.commit(plan, sampled)
        self.steps += 1
        outputs: list[tuple[str, StepOutput]] = []
        produced = 0
        for chunk, result in zip(plan.chunks, results, strict=True):
            if not chunk.logits:
                continue
            request = self._requests[chunk.sequence.request_id]
            if request.text is None:
                outputs += self._verified(request, result)
            else:
                outputs += self._continued(request, request.text, result)
                produced += len(result.tokens)
        self._count(produced)
        return outputs

    def load(self) -> Load:
        """The load right now."""
        now = self._clock.now()
        self._forget_old(now)
        window = min(THROUGHPUT_WINDOW_S, max(now - self._began, 1e-9))
        return Load(
            running_tokens=tuple(len(s.tokens) for s in self.scheduler.running),
            queued_tokens=tuple(len(s.tokens) for s in self.scheduler.waiting),
            free_kv_blocks=self.scheduler.pool.free,
            output_tokens_per_s=sum(count for _, count in self._produced) / window,
        )

    def restart_throughput(self) -> None:
        """Count output tokens from now on: those before were no request's."""
        self._produced.clear()
        self._began = self._clock.now()

    def export_kv(self, request_id: str, first_block: int) -> KvBlocks:
        """A copy of a running request's computed KV. NotFound; InvalidRequest for a block it has not."""
        sequence = self.scheduler.get(request_id)
        if sequence is None or not sequence.blocks or sequence.computed == 0:
            raise NotFound("running request", request_id)
        used = -(-sequence.computed // self.scheduler.pool.block_tokens)
        if not 0 <= first_block <= used:
            raise invalid("first_block", f"the request has {used} blocks")
        data = self.runner.read_blocks(sequence.blocks[first_block:used])
        return KvBlocks(self.runner.kv_layout, first_block, tuple(sequence.tokens[: sequence.computed]), data)

    def _check_queue(self) -> None:
        if len(self.scheduler.waiting) >= self.limits.max_queued + (
            self.limits.batch.max_running - len(self.scheduler.running)
        ):
            rate = max(self.load().output_tokens_per_s, 1.0)
            left = min((s.max_output_tokens - s.output_tokens for s in self.scheduler.running), default=1)
            retry_s = min(10.0, max(0.1, left * max(1, len(self.scheduler.running)) / rate))
            raise Overloaded(f"{len(self.scheduler.waiting)} requests are waiting here already", retry_s)

    def _adopt(self, sequence: Sequence, kv: KvBlocks) -> None:
        layout, known = self.runner.kv_layout, len(kv.tokens)
        if kv.layout != layout:
            raise invalid("kv.layout", f"this engine has {layout}, not {kv.layout}")
        if kv.first_block != 0 or tuple(sequence.tokens[:known]) != kv.tokens:
            raise invalid("kv.tokens", "must be the first tokens of prompt and resume_token_ids, from block 0 on")
        if not 0 < known < len(sequence.tokens):
            raise invalid("kv.tokens", f"must be 1 to {len(sequence.tokens) - 1} tokens, not {known}")
        if len(kv.data) != -(-known // layout.block_tokens):
            raise invalid("kv.data", f"{len(kv.data)} blocks for {known} tokens")
        if len(self.scheduler.running) >= self.limits.batch.max_running:
            raise Overloaded("as many requests run here as may", 0.5)
        try:
            blocks = self.scheduler.adopt(sequence, known)
        except OutOfBlocks as error:
            raise Overloaded(str(error), 0.5) from None
        self.runner.write_blocks(blocks, kv.data)
        self.scheduler.seal(sequence)

    def _row(self, chunk: Chunk) -> Row:
        sequence = chunk.sequence
        end = chunk.start + chunk.count
        request = self._requests[sequence.request_id]
        return Row(
            tokens=sequence.tokens[chunk.start : end],
            start=chunk.start,
            blocks=sequence.blocks,
            logits=chunk.logits,
            sampling=sequence.sampling,
            offset=end - chunk.logits + 1 - sequence.prompt_tokens,
            distributions=bool(request.distributions),
        )

    def _continued(self, request: _Request, text: ReplyText, result: RowResult) -> list[tuple[str, StepOutput]]:
        """Read the new token of an ordinary request."""
        sequence, (token,) = request.sequence, result.tokens
        output = sequence.output_tokens
        said = text.push(token)
        reason = self._end_reason(text, token, output, sequence.max_output_tokens, sequence.sampling)
        if reason is not None:
            said += text.finish()
        logprobs = tuple(self._logprobs(token, raw) for raw in result.logprobs)
        request_id = sequence.request_id
        events: list[tuple[str, StepOutput]] = [(request_id, TokenFrame(output - 1, (token,), said, logprobs))]
        if reason is not None:
            events.append((request_id, self._ended(request, reason)))
        return events

    def _end_reason(
        self, text: ReplyText, token: int, output: int, most: int, sampling: SamplingParams
    ) -> FinishReason | None:
        return reply_rules.end_reason(text, token, output, most, sampling, self.tokenizer)

    def _verified(self, request: _Request, result: RowResult) -> list[tuple[str, StepOutput]]:
        """Gather the results of a draft; decide once they are complete."""
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
        del self._requests[sequence.request_id]
        usage = TokenUsage(sequence.prompt_tokens, sequence.cached_prompt_tokens, sequence.output_tokens)
        stop = request.text.stopped_by if request.text is not None else None
        return Finished(reason, usage, stop, sequence.preemptions)

    def _count(self, produced: int) -> None:
        now = self._clock.now()
        if self._produced and now - self._produced[-1][0] < THROUGHPUT_WINDOW_S / 50:
            at, count = self._produced[-1]
            self._produced[-1] = (at, count + produced)
        else:
            self._produced.append((now, produced))
            self._forget_old(now)

    def _forget_old(self, now: float) -> None:
        while self._produced and now - self._produced[0][0] > THROUGHPUT_WINDOW_S:
            self._produced.popleft()
