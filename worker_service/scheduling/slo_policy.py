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

from penstock.services.domain.instances import SloHeadroom
from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.services.domain.slo.compiled.layout import Kv, StepModel, step_model
from penstock.services.domain.slo.compiled.table import RequestTable, Snapshot, TableRequest, decide
from penstock.services.domain.slo.correction import LatencyCorrection
from penstock.services.domain.slo.draft_windows import FIRST_PACE, DraftPace
from penstock.types.slo import SloClass
from penstock.worker_service.scheduling.batching import BatchScheduler
from penstock.worker_service.scheduling.headroom import headroom
from penstock.worker_service.scheduling.policies import DecodeFirst
from penstock.worker_service.scheduling.sequence import Phase, Sequence
from penstock.worker_service.scheduling.slo_drafts import PlannedStep, allowed_windows, verifying_s
from penstock.worker_service.scheduling.steps import BatchPolicy, Chunk, StepInProgress, queue_key

PROMPTS_AHEAD = 4
"""Best-effort prompts that are computed at once: enough to fill a step with short ones, few enough to hold little KV."""
CORRECTION_STEP = 0.01
"""The step model is replaced when the correction has changed by more than this share."""
HEADROOM_S = 0.05
"""Headroom is computed this often at most; instances publish their load every quarter of a second."""


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
        self._to_start: list[Sequence] = []  # promised, in the table, without KV
        self._promised: dict[str, Sequence] = {}  # by id, until they have finished
        self._planned: list[str] | None = None  # ids that the table gave tokens to, in the current step
        self._chunks: Seq[Chunk] = ()  # of a current step that the table has not planned
        self._planned_s = self._begun_s = 0.0
        self._computed_s = math.inf  # when the step that ended last had been computed
        self._pace = FIRST_PACE  # of drafts, in the step planned last
        self._headroom: SloHeadroom | None = None
        self._headroom_at_s = -math.inf

    @property
    def latency_correction(self) -> float:
        return self._corrected

    def warm(self) -> None:
        """Compile every compiled function, for the types with which it is called."""
        model, kv = step_model(self._latency, 64, self._reserve, self._corrected), Kv(64.0, 0)
        table = RequestTable()
        table.append(TableRequest("decode", 1, 8, due_s=1.0, tpot_s=1.0, decoding=True), SloClass.STANDARD)
        table.append(TableRequest("prompt", 4, 8, due_s=1e6, tpot_s=1.0), SloClass.STANDARD)
        table.append(TableRequest("best effort", 4, 8), SloClass.BEST_EFFORT)
        new = [TableRequest("new", 4, 8, due_s=1e6, tpot_s=2.0)]
        table.apply(decide(0.0, table.snapshot(), new, model, kv))
        took_s = table.plan(0.0, model, kv)
        table.lengthen(took_s, 0, model, kv)
        table.may_end_s(took_s, {}, model, kv)
        table.snapshot(planned=True, end_s=took_s)
        table.commit(took_s)
        table.advance("decode", 1, took_s)
        headroom([(1.0, 1)], 0, 0, model)

    def added(self, sequence: Sequence) -> None:
        if sequence.slo is not None and sequence.slo.granted is None:
            self._undecided.append(sequence)

    def finished(self, sequence: Sequence) -> None:
        self._leave_column(sequence)
        self._promised.pop(sequence.request_id, None)
        if sequence in self._to_start:
            self._to_start.remove(sequence)

    def preempted(self, sequence: Sequence) -> None:
        self._leave_column(sequence)
        if sequence.promised:  # there was no best effort left to take blocks from
            self._wait(sequence)

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
        new = [_as_request(s) for s in undecided]
        decision = decide(now_s, snapshot, new, self._step_model(scheduler), self._kv(scheduler))
        for sequence, granted in zip(undecided, decision.admitted, strict=True):
            assert sequence.slo is not None
            sequence.slo.granted = SloClass.STANDARD if granted else SloClass.BEST_EFFORT
            if granted:
                self._promised[sequence.request_id] = sequence
                self._wait(sequence)
        if any(decision.admitted):
            self._table.apply(decision)
        self._headroom_at_s = -math.inf
        return undecided

    def _wait(self, sequence: Sequence) -> None:
        """A sequence has its promise, and a column from now on; one that has no KV is to be started."""
        self._table.append(_as_request(sequence), SloClass.STANDARD)
        self._columns.add(sequence.request_id)
        if sequence.phase is not Phase.RUNNING or sequence.computed == 0:
            self._to_start.append(sequence)

    def _kv(self, scheduler: BatchScheduler) -> Kv:
        """KV for the promised sequences of the table: the others keep blocks for all their tokens."""
        block = scheduler.pool.block_tokens
        return Kv(float(max(0, scheduler.pool.count - self._blocks_aside(block)) * block), block - 1)

    def _after_step(self, now_s: float) -> tuple[float, Snapshot]:
        """When the current step is predicted to end, and the requests as they will be then."""
        if self._planned is None:  # no promise in it
            ends_s = self._begun_s + self._latency.step_s(_load(self._chunks)) * self._corrected
            return max(now_s, ends_s), self._table.snapshot()
        ends_s = max(now_s, self._begun_s + self._planned_s)
        return ends_s, self._table.snapshot(planned=True, end_s=ends_s)

    def headroom(self, scheduler: BatchScheduler, now_s: float) -> SloHeadroom:
        """What could still be promised, at most HEADROOM_S old."""
        if self._headroom is not None and now_s - self._headroom_at_s < HEADROOM_S:
            return self._headroom
        promised = self._promised.values()
        decodes = [(s.slo.tpot_s, len(s.tokens)) for s in promised if s.decoding and s.slo is not None]
        pending = sum(s.pending for s in promised if not s.decoding)
        self._headroom_at_s = now_s
        block = scheduler.pool.block_tokens
        free_tokens = (
            max(0, scheduler.pool.count - self._reserved_blocks(block)) * block
        )  # what best effort holds is free
        self._headroom = headroom(decodes, pending, free_tokens, self._step_model(scheduler))
        return self._headroom

    def _reserved_blocks(self, block: int) -> int:
        """Blocks that promised sequences hold at most at any time: by certificate, at most those of all their tokens."""
        certified = self._blocks_aside(block) + math.ceil(self._table.most_held / block)
        return min(certified, sum(_whole_blocks(s, block) for s in self._promised.values()))

    def _blocks_aside(self, block: int) -> int:
        """Blocks for all tokens of promised sequences that are not in the table: they move."""
        return sum(_whole_blocks(s, block) for name, s in self._promised.items() if name not in self._columns)

    def plan(self, step: StepInProgress, now_s: float) -> None:
        self.decide(step.scheduler, now_s)
        self._begun_s, self._chunks, self._computed_s = now_s, (), math.inf
        if not self._promised:
            self._planned = None
            if self._columns:  # not kept up to date without promises
                self._columns, self._table = set(), RequestTable()
            self._fallback.plan(step, now_s)
            self._chunks = step.chunks
            return
        if step.scheduler.waiting or len(step.scheduler.running) > len(self._promised):
            while self._room_blocks(step) < 0 and self._preempt_best_effort(step):
                pass  # its next tokens would use blocks that are reserved for promises
            self._start_best_effort(step)
        self._update_columns(step.scheduler)
        self._planned_s = self._table.plan(now_s, self._step_model(step.scheduler), self._kv(step.scheduler))
        while self._start_promised(step):
            model, kv = self._step_model(step.scheduler), self._kv(step.scheduler)
            self._planned_s = self._table.plan(now_s, model, kv, again=True)
        granted = self._granted()
        if any(s.request_id in granted for s in self._to_start):  # no blocks for it: those that have places continue
            model = self._step_model(step.scheduler)._replace(places=len(self._promised) - len(self._to_start))
            self._planned_s = self._table.plan(now_s, model, self._kv(step.scheduler), again=True)
            granted = self._granted()
        self._planned = list(granted)
        for name, count in granted.items():
            sequence = step.scheduler.get(name)
            if sequence is not None:
                step.give(sequence, count)

    def _granted(self) -> dict[str, int]:
        """The tokens of the planned step, by request."""
        return {name: count for name, count in zip(self._table.ids, self._table.grants(), strict=True) if count}

    def proposal_limits(
        self, scheduler: BatchScheduler, limits: Mapping[str, int], pace: Callable[[], DraftPace]
    ) -> Mapping[str, int]:
        """With promises, only for requests under one, and as far as all promises are kept even if no draft is accepted."""
        if self._planned is None or not limits:
            return limits
        model, kv, ends_s = self._step_model(scheduler), self._kv(scheduler), self._begun_s + self._planned_s
        step = PlannedStep(
            ends_s,
            self._table.snapshot(planned=True, end_s=ends_s),
            self._table.yields(),
            sum(self._table.grants()),
            limits,
            lambda end_s, aside: self._table.lengthen(end_s, aside, model, kv),
        )
        self._pace = pace()
        return allowed_windows(
            step,
            self._pace,
            self._latency,
            model,
            correction=self._corrected,
            prompts_wait=bool(scheduler.waiting) or any(s.pending > 1 for s in scheduler.running),
        )

    def proposed(self, chunks: Seq[Chunk]) -> None:
        self._chunks = chunks
        if self._planned is None:
            return
        drafted = [len(chunk.proposed) for chunk in chunks]
        tokens = sum(chunk.count for chunk in chunks)
        self._planned_s += verifying_s(self._latency, self._corrected, tokens, sum(drafted))
        self._planned_s += self._pace.step_s * max(drafted)

    def may_end_s(
        self, scheduler: BatchScheduler, computed_s: float, accepted: Mapping[str, int]
    ) -> tuple[float, bool]:
        self._computed_s = computed_s
        if self._planned is None:
            return computed_s, True
        return self._table.may_end_s(computed_s, accepted, self._step_model(scheduler), self._kv(scheduler))

    def committed(self, chunks: Seq[Chunk], end_s: float) -> None:
        if self._planned is None:
            # Observed as well: once steps have been slow, nothing is promised until steps without one are seen to be fast.
            if not any(chunk.proposed for chunk in chunks):
                self.observe(self._latency.step_s(_load(chunks)), min(end_s, self._computed_s) - self._begun_s)
            return
        done = {chunk.sequence.request_id for chunk in chunks}
        skipped = [request_id for request_id in self._planned if request_id not in done]
        self._table.commit(end_s, skipped)
        for chunk in chunks:
            accepted = chunk.sequence.computed - chunk.start - chunk.count
            if accepted > 0 and chunk.sequence.request_id in self._columns:
                self._table.advance(chunk.sequence.request_id, accepted, end_s)
        if not skipped:
            self.observe(self._planned_s / self._corrected, min(end_s, self._computed_s) - self._begun_s)
        self._planned = None

    def observe(self, predicted_s: float, took_s: float) -> None:
        """Compare the step with its prediction, without correction; replace the step model if the correction has changed."""
        self.correction.add(predicted_s, took_s)
        factor = self.correction.factor
        if abs(factor - self._corrected) > CORRECTION_STEP * self._corrected:
            self._corrected, self._model = factor, None

    def _step_model(self, scheduler: BatchScheduler) -> StepModel:
        if self._model is None:
            limit = scheduler.limits.max_step_tokens
            self._model = step_model(self._latency, limit, self._reserve, self._corrected)
        moving = sum(name not in self._columns for name in self._promised)
        places = scheduler.free_places + len(scheduler.running) - moving
        return self._model if self._model.places == places else self._model._replace(places=places)

    def _start_promised(self, step: StepInProgress) -> bool:
        """Start the promised sequences that the planned step has tokens for; best effort gives up blocks and places for them,
        the last one started first. Whether the step is to be planned again."""
        changed, granted = False, self._granted()
        for sequence in [s for s in self._to_start if s.request_id in granted]:
            started = step.scheduler.start(sequence)
            while not started and self._preempt_best_effort(step):
                changed, started = True, step.scheduler.start(sequence)
            if started:
                self._to_start.remove(sequence)
                self._table.place(sequence.request_id, sequence.computed, sequence.pending)
                changed = True
        return changed

    def _start_best_effort(self, step: StepInProgress) -> None:
        """Start waiting sequences, in queue order, while the promises leave room for all their tokens and the next one."""
        scheduler, block = step.scheduler, step.scheduler.pool.block_tokens
        prompts = sum(not s.promised and s.pending > 1 for s in scheduler.running)
        for sequence in [s for s in scheduler.waiting if not s.promised]:
            needed = -(-(len(sequence.tokens) + 1) // block)
            if prompts >= PROMPTS_AHEAD or step.preempted or needed > self._room_blocks(step):
                return
            if scheduler.free_places <= len(self._to_start) or not scheduler.start(sequence):
                return  # promised ones are to have the next places
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
        if not paused and len(running) + len(self._to_start) == len(self._columns):
            return
        for sequence in running:
            request_id = sequence.request_id
            if sequence.paused:
                self._leave_column(sequence)
            elif request_id not in self._columns and sequence not in but:
                granted = SloClass.STANDARD if sequence.promised else SloClass.BEST_EFFORT
                self._table.append(_as_request(sequence), granted)
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
    return -(-(len(sequence.tokens) + slo.left_tokens(sequence.output_tokens)) // block)


def _as_request(sequence: Sequence) -> TableRequest:
    slo, produced = sequence.slo, sequence.output_tokens
    request = TableRequest(
        sequence.request_id,
        pending_tokens=sequence.pending,
        output_tokens=slo.left_tokens(produced) if slo else max(1, sequence.max_output_tokens - produced),
        context_tokens=sequence.computed,
        decoding=sequence.decoding and produced > 0,  # a prompt of one token is none
        placed=sequence.phase is Phase.RUNNING and sequence.computed > 0,
    )
    if slo is None:
        return request
    return replace(request, due_s=slo.due_s, tpot_s=slo.tpot_s, again_tokens=slo.again_tokens)


def _load(chunks: Seq[Chunk]) -> StepLoad:
    """The load of a step with these chunks."""
    context = sum(chunk.start + chunk.tokens for chunk in chunks)
    pairs = sum(chunk.tokens * (chunk.start + 0.5 * (chunk.tokens + 1)) for chunk in chunks if chunk.tokens > 1)
    return StepLoad(sum(chunk.tokens for chunk in chunks), context, pairs)
