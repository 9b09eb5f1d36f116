"""Steps under SLOs: which requests are admitted, and how steps are shared between promises and best effort. No I/O.

The decisions are those of `services.domain.slo.compiled`, which the simulator calls too; here they are applied to sequences
and blocks. `decide` decides on all sequences together that have asked for an SLO since the last call: between two steps, or
while a step is computed, from a snapshot of the requests as they will be at its end. Those admitted start with the next step:
the certificate of their admission says how much KV all promises hold at most at any time. Best effort gives up blocks for
them (KV, never tokens; it resumes by one prefill). All other sequences are best effort: they get what is left, and are
started only with room for one token more.
"""

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from services.domain.instances import SloHeadroom
from services.domain.latency import StepLatencyModel, StepLoad
from services.domain.slo.compiled.admission import budget_per_s
from services.domain.slo.compiled.layout import KIND, STANDARD, StepModel, step_model
from services.domain.slo.compiled.table import RequestTable, Snapshot, TableRequest, decide
from services.domain.slo.correction import LatencyCorrection
from services.domain.slo.draft_windows import FIRST_PACE, DraftPace
from services.domain.slo.promises import SloClass
from worker_service.scheduling.batching import BatchScheduler
from worker_service.scheduling.policies import DecodeFirst
from worker_service.scheduling.sequence import Phase, Sequence
from worker_service.scheduling.slo_drafts import PlannedStep, allowed_windows, verifying_s
from worker_service.scheduling.steps import BatchPolicy, Chunk, StepInProgress, queue_key

PROMPTS_AHEAD = 4
"""Best-effort prompts that are computed at once: enough to fill a step with short ones, few enough to hold little KV."""
CORRECTION_STEP = 0.01
"""The step model is replaced when the correction has changed by more than this share."""
HEADROOM_S = 0.05
"""Headroom is computed this often at most; instances publish their load every quarter of a second."""
MAX_BACKLOG_S = 3600.0
"""The backlog of an engine that cannot compute prompts in addition to its decodes."""


class SloPolicy(BatchPolicy):
    """SLOs-Serve (sections 3.2.2 and 4.1). Without a sequence under a promise, steps are exactly those of `DecodeFirst`."""

    keeps_slos = True

    def __init__(self, latency: StepLatencyModel, reserve: float, correction: LatencyCorrection | None = None) -> None:
        """`latency` is of a step, `reserve` the share of its time that best effort has while it has work (0 to under 1)."""
        self._latency, self._reserve = latency, reserve
        self.correction = correction or LatencyCorrection()
        self._corrected = self.correction.factor
        self._model: StepModel | None = None
        self._fallback = DecodeFirst()
        self._table = RequestTable()
        self._columns: set[str] = set()  # ids in the table
        self._undecided: list[Sequence] = []
        self._to_start: list[Sequence] = []  # admitted, without KV
        self._promised: dict[str, Sequence] = {}  # by id, until they have finished
        self._most_blocks = 0  # that promised sequences hold at any time, by the latest certificate
        self._release_s: dict[str, float] = {}  # of those admitted, until they are in the table
        self._planned: list[str] | None = None  # ids that the table gave tokens to, in the current step
        self._chunks: Seq[Chunk] = ()  # of a current step that the table has not planned
        self._planned_s = self._begun_s = 0.0
        self._pace = FIRST_PACE  # of drafts, in the step planned last
        self._headroom: SloHeadroom | None = None
        self._headroom_at_s = -math.inf
        self.replays = 0

    @property
    def latency_correction(self) -> float:
        return self._corrected

    def warm(self) -> None:
        """Compile every compiled function, for the types with which it is called."""
        model = step_model(self._latency, 64, self._reserve, self._corrected)
        table = RequestTable()
        table.append(TableRequest("decode", 1, 8, due_s=1.0, tpot_s=1.0, decoding=True), SloClass.STANDARD)
        table.append(TableRequest("prompt", 4, 8, due_s=1e6, tpot_s=1.0), SloClass.STANDARD)
        table.append(TableRequest("best effort", 4, 8), SloClass.BEST_EFFORT)
        new = [TableRequest("new", 4, 8, due_s=1e6, tpot_s=2.0)]
        table.apply(decide(0.0, table.snapshot(), new, model, kv_tokens=64, free_places=4))
        _, took_s = table.plan(0.0, model)
        table.snapshot(planned=True, end_s=took_s)
        table.commit(took_s)
        budget_per_s(np.ones(1, np.int64), np.ones(1), 1.0, model)

    def added(self, sequence: Sequence) -> None:
        if sequence.slo is not None and sequence.slo.granted is None:
            self._undecided.append(sequence)

    def finished(self, sequence: Sequence) -> None:
        self._leave_column(sequence)
        self._promised.pop(sequence.request_id, None)
        self._release_s.pop(sequence.request_id, None)
        if sequence in self._to_start:
            self._to_start.remove(sequence)

    def preempted(self, sequence: Sequence) -> None:
        self._leave_column(sequence)
        if sequence.promised:  # there was no best effort left to take blocks from
            self._to_start.append(sequence)

    def victim_key(self, sequence: Sequence) -> tuple[int, ...]:
        return 0 if sequence.promised else 1, *queue_key(sequence)

    def decide(self, scheduler: BatchScheduler, now_s: float, *, during_step: bool = False) -> list[Sequence]:
        """Decide together on all sequences that have asked for an SLO since the last call."""
        undecided = [s for s in self._undecided if s.phase is not Phase.FINISHED]
        self._undecided.clear()
        if not undecided:
            return []
        if during_step:
            now_s, snapshot = self._after_step(now_s)
        else:
            self._update_columns(scheduler, but=undecided)
            snapshot = self._table.snapshot()
        block = scheduler.pool.block_tokens
        admitted = [(_as_request(s), self._release_s.get(s.request_id, -math.inf)) for s in self._to_start]
        places = scheduler.free_places + sum(not s.promised for s in scheduler.running) - len(self._to_start)
        aside = self._blocks_aside(snapshot, block)
        decision = decide(
            now_s,
            snapshot.with_admitted(admitted),
            [_as_request(s) for s in undecided],
            self._step_model(scheduler),
            kv_tokens=(scheduler.pool.count - aside) * block,
            partial_tokens=block - 1,
            free_places=max(0, places),
        )
        if math.isfinite(decision.kv_tokens):
            self._most_blocks = aside + math.ceil(decision.kv_tokens / block)
        self.replays += decision.replays
        self._table.apply(decision)
        for waiting in self._to_start:
            self._release_s[waiting.request_id] = decision.release_s[waiting.request_id]
        for sequence, granted in zip(undecided, decision.admitted, strict=True):
            assert sequence.slo is not None
            sequence.slo.granted = SloClass.STANDARD if granted else SloClass.BEST_EFFORT
            if granted:
                self._promised[sequence.request_id] = sequence
                self._release_s[sequence.request_id] = decision.release_s[sequence.request_id]
                if sequence.phase is Phase.WAITING:
                    self._to_start.append(sequence)
        self._headroom_at_s = -math.inf
        return undecided

    def _after_step(self, now_s: float) -> tuple[float, Snapshot]:
        """When the current step is predicted to end, and the requests as they will be then."""
        if self._planned is None:  # no promise in it
            ends_s = self._begun_s + self._latency.step_s(_load(self._chunks)) * self._corrected
            return max(now_s, ends_s), Snapshot.empty()
        ends_s = max(now_s, self._begun_s + self._planned_s)
        return ends_s, self._table.snapshot(planned=True, end_s=ends_s)

    def headroom(self, scheduler: BatchScheduler, now_s: float) -> SloHeadroom:
        """What could still be promised, at most HEADROOM_S old."""
        if self._headroom is not None and now_s - self._headroom_at_s < HEADROOM_S:
            return self._headroom
        decodes = dict[float, int]()
        prompt_tokens = contexts = 0
        for sequence in self._promised.values():
            assert sequence.slo is not None
            if sequence.decoding:
                decodes[sequence.slo.tpot_s] = decodes.get(sequence.slo.tpot_s, 0) + 1
                contexts += len(sequence.tokens)
            else:
                prompt_tokens += sequence.pending
        rate = budget_per_s(
            np.array([*decodes.values()], np.int64),
            np.array([*decodes], np.float64),
            contexts / max(1, sum(decodes.values())),
            self._step_model(scheduler),
        )
        backlog_s = prompt_tokens / rate if rate > 0 else MAX_BACKLOG_S
        self._headroom_at_s = now_s
        self._headroom = SloHeadroom(min(MAX_BACKLOG_S, backlog_s), max(0.0, rate), self._free_tokens(scheduler))
        return self._headroom

    def _free_tokens(self, scheduler: BatchScheduler) -> int:
        """Tokens of KV that are reserved for no promise; what best effort holds counts as free."""
        block = scheduler.pool.block_tokens
        return max(0, scheduler.pool.count - self._reserved_blocks(block)) * block

    def _reserved_blocks(self, block: int) -> int:
        """Blocks that promised sequences hold at most at any time: by certificate, at most those of all their tokens."""
        return min(self._most_blocks, sum(_whole_blocks(s, block) for s in self._promised.values()))

    def _blocks_aside(self, snapshot: Snapshot, block: int, *, started: bool = False) -> int:
        """Blocks for promised sequences that no certificate follows: those that move, those of which only the first token was
        promised, which they have, and of a certificate of the started ones those that are to start."""
        followed = {name for name, kind in zip(snapshot.ids, snapshot.counts[KIND], strict=True) if kind == STANDARD}
        if not started:
            followed.update(s.request_id for s in self._to_start)
        return sum(_whole_blocks(s, block) for name, s in self._promised.items() if name not in followed)

    def plan(self, step: StepInProgress, now_s: float) -> None:
        self.decide(step.scheduler, now_s)
        self._begun_s, self._chunks = now_s, ()
        if not self._promised:
            self._planned = None
            if self._columns:  # not kept up to date without promises
                self._columns, self._table = set(), RequestTable()
            self._fallback.plan(step, now_s)
            self._chunks = step.chunks
            return
        self._start_promised(step)
        if step.scheduler.waiting or len(step.scheduler.running) > len(self._promised):
            self._keep_room(step)
            self._start_best_effort(step)
        self._update_columns(step.scheduler)
        counts, self._planned_s = self._table.plan(now_s, self._step_model(step.scheduler))
        given = [(name, count) for name, count in zip(self._table.ids, counts, strict=True) if count]
        self._planned = [name for name, _ in given]
        for name, count in given:
            sequence = step.scheduler.get(name)
            if sequence is not None:
                step.give(sequence, count)

    def proposal_limits(
        self, scheduler: BatchScheduler, limits: Mapping[str, int], pace: Callable[[], DraftPace]
    ) -> Mapping[str, int]:
        """With promises, only for requests under one, and as far as all promises are kept even if no drafted token stands."""
        if self._planned is None or not limits:
            return limits
        block = scheduler.pool.block_tokens
        aside = self._blocks_aside(self._table.snapshot(), block, started=True)
        tokens = sum(self._table.grants())
        step = PlannedStep(
            self._begun_s + self._planned_s,
            lambda end_s: self._table.snapshot(planned=True, end_s=end_s),
            self._table.yields(),
            tokens,
            limits,
            max(0, scheduler.pool.count - aside) * block,
            block - 1,
        )
        self._pace = pace()
        allowed = allowed_windows(
            step,
            self._pace,
            self._latency,
            self._step_model(scheduler),
            correction=self._corrected,
            prompts_wait=bool(scheduler.waiting) or any(s.pending > 1 for s in scheduler.running),
        )
        if allowed.windows:
            self._most_blocks = aside + math.ceil(allowed.kv_tokens / block)
        return allowed.windows

    def proposed(self, chunks: Seq[Chunk]) -> None:
        self._chunks = chunks
        if self._planned is None:
            return
        drafted = [len(chunk.proposed) for chunk in chunks]
        tokens = sum(chunk.count for chunk in chunks)
        self._planned_s += verifying_s(self._latency, self._corrected, tokens, sum(drafted))
        self._planned_s += self._pace.step_s * max(drafted)

    def committed(self, chunks: Seq[Chunk], end_s: float) -> None:
        if self._planned is None:
            # Observed as well: once steps have been slow, nothing is promised until steps without one are seen to be fast.
            if not any(chunk.proposed for chunk in chunks):
                self._observe(self._latency.step_s(_load(chunks)), end_s - self._begun_s)
            return
        done = {chunk.sequence.request_id for chunk in chunks}
        skipped = [request_id for request_id in self._planned if request_id not in done]
        self._table.commit(end_s, skipped)
        for chunk in chunks:
            accepted = chunk.sequence.computed - chunk.start - chunk.count
            if accepted > 0 and chunk.sequence.request_id in self._columns:
                self._table.advance(chunk.sequence.request_id, accepted, end_s)
        if not skipped:
            self._observe(self._planned_s / self._corrected, end_s - self._begun_s)
        self._planned = None

    def _observe(self, predicted_s: float, took_s: float) -> None:
        """Compare the step with its prediction, without correction; replace the step model if the correction has changed."""
        self.correction.add(predicted_s, took_s)
        factor = self.correction.factor
        if abs(factor - self._corrected) > CORRECTION_STEP * self._corrected:
            self._corrected, self._model = factor, None

    def _step_model(self, scheduler: BatchScheduler) -> StepModel:
        if self._model is None:
            limit = scheduler.limits.max_step_tokens
            self._model = step_model(self._latency, limit, self._reserve, self._corrected)
        return self._model

    def _start_promised(self, step: StepInProgress) -> None:
        """Start the admitted sequences; best effort gives up blocks and places for them, the last one started first."""
        waiting, self._to_start = self._to_start, []
        for sequence in waiting:
            while not step.start(sequence):
                if not self._preempt_best_effort(step):
                    self._to_start.append(sequence)
                    break

    def _keep_room(self, step: StepInProgress) -> None:
        """Take blocks from best effort while its next tokens would use blocks that are reserved for promises."""
        while self._room_blocks(step) < 0 and self._preempt_best_effort(step):
            pass

    def _start_best_effort(self, step: StepInProgress) -> None:
        """Start waiting sequences, in queue order, while the promises leave room for all their tokens and the next one."""
        scheduler, block = step.scheduler, step.scheduler.pool.block_tokens
        prompts = sum(not s.promised and s.pending > 1 for s in scheduler.running)
        for sequence in [s for s in scheduler.waiting if not s.promised]:
            needed = -(-(len(sequence.tokens) + 1) // block)
            if prompts >= PROMPTS_AHEAD or step.preempted or needed > self._room_blocks(step):
                return
            if not step.start(sequence):
                return
            prompts += 1

    def _room_blocks(self, step: StepInProgress) -> int:
        """Blocks that are neither held, nor reserved for a promise, nor needed for best effort's tokens and the next one."""
        scheduler, block = step.scheduler, step.scheduler.pool.block_tokens
        held = sum(len(s.blocks) for s in self._promised.values())
        reserved = max(0, self._reserved_blocks(block) - held)
        growing = sum(
            max(0, -(-(len(s.tokens) + 1) // block) - len(s.blocks)) for s in scheduler.running if not s.promised
        )
        return scheduler.pool.free - reserved - growing

    def _preempt_best_effort(self, step: StepInProgress) -> bool:
        able = [s for s in step.scheduler.running if not s.promised and not s.paused]
        if not able:
            return False
        step.preempt(max(able, key=queue_key))
        return True

    def _update_columns(self, scheduler: BatchScheduler, but: Seq[Sequence] = ()) -> None:
        """Make the table hold exactly the running sequences that are not paused. but: these are not added."""
        running = scheduler.running
        paused = any(s.paused for s in running)
        if not paused and len(running) == len(self._columns):
            return
        for sequence in running:
            request_id = sequence.request_id
            if sequence.paused:
                self._leave_column(sequence)
            elif request_id not in self._columns and sequence not in but:
                granted = SloClass.STANDARD if sequence.promised else SloClass.BEST_EFFORT
                release_s = self._release_s.pop(request_id, -math.inf)
                self._table.append(_as_request(sequence), granted, release_s)
                self._columns.add(request_id)

    def _leave_column(self, sequence: Sequence) -> None:
        """Remove a sequence from the table; note when its next token is due."""
        if sequence.request_id in self._columns:
            if sequence.slo is not None:
                sequence.slo.due_s = self._table.due_s(sequence.request_id)
            self._columns.remove(sequence.request_id)
            self._table.remove(sequence.request_id)


def _whole_blocks(sequence: Sequence, block: int) -> int:
    """Blocks for the tokens of a sequence, those predicted included."""
    slo = sequence.slo
    assert slo is not None
    return -(-max(len(sequence.tokens), sequence.prompt_tokens + slo.output_tokens) // block)


def _as_request(sequence: Sequence) -> TableRequest:
    slo = sequence.slo
    request = TableRequest(
        sequence.request_id,
        pending_tokens=sequence.pending,
        output_tokens=max(1, (slo.output_tokens if slo else sequence.max_output_tokens) - sequence.output_tokens),
        context_tokens=sequence.computed,
        decoding=sequence.decoding and sequence.output_tokens > 0,  # a prompt of one token is none
    )
    if slo is None:
        return request
    return replace(request, due_s=slo.due_s, tpot_s=slo.tpot_s, value=slo.value)


def _load(chunks: Seq[Chunk]) -> StepLoad:
    """The load of a step with these chunks."""
    context = sum(chunk.start + chunk.tokens for chunk in chunks)
    pairs = sum(chunk.tokens * (chunk.start + 0.5 * (chunk.tokens + 1)) for chunk in chunks if chunk.tokens > 1)
    return StepLoad(sum(chunk.tokens for chunk in chunks), context, pairs)
