"""Steps under SLOs: who is admitted, and how a worker's steps are shared between promises and best effort. No I/O.

The decisions are those of `services.domain.slo.compiled`, which the simulator calls too; here they meet sequences and blocks.
Between two steps this policy decides on all sequences that have come with an SLO since, together. Those admitted start at
once: the KV of their prompt and likely reply is theirs, and best effort gives up blocks for it (KV, never tokens; it resumes
by one prefill). All else is best effort: it runs on what is left over, and is started only where it has room to make a token.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import replace

from services.domain.latency import StepLatencyModel
from services.domain.slo.compiled.layout import StepModel, step_model
from services.domain.slo.compiled.table import RequestTable, TableRequest, decide
from services.domain.slo.correction import LatencyCorrection
from services.domain.slo.promises import SloClass
from worker_service.scheduling.batching import BatchScheduler
from worker_service.scheduling.policies import DecodeFirst
from worker_service.scheduling.sequence import Phase, Sequence
from worker_service.scheduling.steps import BatchPolicy, Chunk, StepInProgress, queue_key

PROMPTS_AHEAD = 4
"""Best-effort prompts that are under way at once: enough to fill a step with short ones, few enough to hold little KV."""
CORRECTION_STEP = 0.01
"""The step model is made anew when the correction has changed by more than this share."""


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
        self._asking: list[Sequence] = []
        self._to_start: list[Sequence] = []  # admitted, without KV
        self._promised: dict[str, Sequence] = {}  # by id, until they have finished
        self._release_s: dict[str, float] = {}  # of those admitted, until they are in the table
        self._planned: list[str] | None = None  # ids that the table gave tokens to, in the step under way
        self._planned_s = self._begun_s = 0.0
        self.replays = 0

    @property
    def latency_correction(self) -> float:
        return self._corrected

    def warm(self) -> None:
        """Have every compiled function compiled, for the types that it is called with."""
        model = step_model(self._latency, 64, self._reserve, self._corrected)
        table = RequestTable()
        table.append(TableRequest("decode", 1, 8, due_s=1.0, tpot_s=1.0, decoding=True), SloClass.STANDARD)
        table.append(TableRequest("prompt", 4, 8, due_s=1e6, tpot_s=1.0), SloClass.STANDARD)
        table.append(TableRequest("best effort", 4, 8), SloClass.BEST_EFFORT)
        new = [TableRequest("new", 4, 8, due_s=1e6, tpot_s=2.0, memory_tokens=12)]
        table.apply(decide(0.0, table.snapshot(), new, model, free_memory_tokens=64, free_places=4))
        _, took_s = table.plan(0.0, model)
        table.commit(took_s)

    def added(self, sequence: Sequence) -> None:
        if sequence.slo is not None and sequence.slo.granted is None:
            self._asking.append(sequence)

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

    def decide(self, scheduler: BatchScheduler, now_s: float) -> list[Sequence]:
        """Admit whom the promises allow, all of those together who have asked since the last step."""
        asking = [s for s in self._asking if s.phase is Phase.WAITING]
        self._asking.clear()
        if not asking:
            return []
        self._enter_columns(scheduler)
        block = scheduler.pool.block_tokens
        free = scheduler.pool.count - sum(self._reserved_blocks(s, block) for s in self._promised.values())
        places = scheduler.free_places + sum(not s.promised for s in scheduler.running) - len(self._to_start)
        candidates = [_as_request(s, self._reserved_blocks(s, block) * block) for s in asking]
        decision = decide(
            now_s,
            self._table.snapshot(),
            candidates,
            self._step_model(scheduler),
            free_memory_tokens=max(0, free) * block,
            free_places=max(0, places),
        )
        self.replays += decision.replays
        self._table.apply(decision)
        for sequence, admitted in zip(asking, decision.admitted, strict=True):
            assert sequence.slo is not None
            sequence.slo.granted = SloClass.STANDARD if admitted else SloClass.BEST_EFFORT
            if admitted:
                self._promised[sequence.request_id] = sequence
                self._to_start.append(sequence)
                self._release_s[sequence.request_id] = decision.release_s[sequence.request_id]
        return asking

    def plan(self, step: StepInProgress, now_s: float) -> None:
        self.decide(step.scheduler, now_s)
        if not self._promised:
            self._planned = None
            if self._columns:  # not kept up to date without promises
                self._columns, self._table = set(), RequestTable()
            self._fallback.plan(step, now_s)
            return
        self._start_promised(step)
        if step.scheduler.waiting or len(step.scheduler.running) > len(self._promised):
            self._keep_room(step)
            self._start_best_effort(step)
        self._enter_columns(step.scheduler)
        counts, self._planned_s = self._table.plan(now_s, self._step_model(step.scheduler))
        self._begun_s = now_s
        given = [(name, count) for name, count in zip(self._table.ids, counts, strict=True) if count]
        self._planned = [name for name, _ in given]
        for name, count in given:
            sequence = step.scheduler.get(name)
            if sequence is not None:
                step.give(sequence, count)

    def committed(self, chunks: Seq[Chunk], end_s: float) -> None:
        if self._planned is None:
            return
        done = {chunk.sequence.request_id for chunk in chunks}
        skipped = [request_id for request_id in self._planned if request_id not in done]
        self._table.commit(end_s, skipped)
        if not skipped:
            self._observe(end_s - self._begun_s)
        self._planned = None

    def _observe(self, took_s: float) -> None:
        """Compare the step with its prediction, and predict anew where the correction has moved."""
        self.correction.add(self._planned_s / self._corrected, took_s)
        factor = self.correction.factor
        if abs(factor - self._corrected) > CORRECTION_STEP * self._corrected:
            self._corrected, self._model = factor, None

    def _step_model(self, scheduler: BatchScheduler) -> StepModel:
        if self._model is None:
            most = scheduler.limits.max_step_tokens
            self._model = step_model(self._latency, most, self._reserve, self._corrected)
        return self._model

    def _start_promised(self, step: StepInProgress) -> None:
        """Start those admitted; best effort gives up blocks and places for them, the one that started last first."""
        waiting, self._to_start = self._to_start, []
        for sequence in waiting:
            while not step.start(sequence):
                if not self._preempt_best_effort(step):
                    self._to_start.append(sequence)
                    break

    def _keep_room(self, step: StepInProgress) -> None:
        """Blocks that promises will need and that best effort's next tokens do not leave are taken from best effort."""
        while self._room_blocks(step) < 0 and self._preempt_best_effort(step):
            pass

    def _start_best_effort(self, step: StepInProgress) -> None:
        """Start those who wait, in queue order, where all their tokens and the next one have room beside the promises."""
        scheduler, block = step.scheduler, step.scheduler.pool.block_tokens
        under_way = sum(not s.promised and s.pending > 1 for s in scheduler.running)
        for sequence in [s for s in scheduler.waiting if not s.promised]:
            needed = -(-(len(sequence.tokens) + 1) // block)
            if under_way >= PROMPTS_AHEAD or step.preempted or needed > self._room_blocks(step):
                return
            if not step.start(sequence):
                return
            under_way += 1

    def _room_blocks(self, step: StepInProgress) -> int:
        """Blocks that are neither held, nor kept for a promise, nor needed for best effort's tokens so far and the next."""
        scheduler, block = step.scheduler, step.scheduler.pool.block_tokens
        kept = sum(max(0, self._reserved_blocks(s, block) - len(s.blocks)) for s in self._promised.values())
        growing = sum(
            max(0, -(-(len(s.tokens) + 1) // block) - len(s.blocks)) for s in scheduler.running if not s.promised
        )
        return scheduler.pool.free - kept - growing

    @staticmethod
    def _reserved_blocks(sequence: Sequence, block: int) -> int:
        """Blocks for all tokens that a sequence has and will likely have."""
        slo = sequence.slo
        assert slo is not None
        return -(-max(len(sequence.tokens), sequence.prompt_tokens + slo.output_tokens) // block)

    def _preempt_best_effort(self, step: StepInProgress) -> bool:
        able = [s for s in step.scheduler.running if not s.promised and not s.paused]
        if not able:
            return False
        step.preempt(max(able, key=queue_key))
        return True

    def _enter_columns(self, scheduler: BatchScheduler) -> None:
        """Have exactly those in the table who run and are not paused."""
        running = scheduler.running
        paused = any(s.paused for s in running)
        if not paused and len(running) == len(self._columns):
            return
        for sequence in running:
            request_id = sequence.request_id
            if sequence.paused:
                self._leave_column(sequence)
            elif request_id not in self._columns:
                granted = SloClass.STANDARD if sequence.promised else SloClass.BEST_EFFORT
                release_s = self._release_s.pop(request_id, -math.inf)
                self._table.append(_as_request(sequence, 0), granted, release_s)
                self._columns.add(request_id)

    def _leave_column(self, sequence: Sequence) -> None:
        """Out of the table, keeping when its next token is due."""
        if sequence.request_id in self._columns:
            if sequence.slo is not None:
                sequence.slo.due_s = self._table.due_s(sequence.request_id)
            self._columns.remove(sequence.request_id)
            self._table.remove(sequence.request_id)


def _as_request(sequence: Sequence, memory_tokens: int) -> TableRequest:
    slo = sequence.slo
    asked = TableRequest(
        sequence.request_id,
        pending_tokens=sequence.pending,
        output_tokens=max(1, (slo.output_tokens if slo else sequence.max_output_tokens) - sequence.output_tokens),
        context_tokens=sequence.computed,
        memory_tokens=memory_tokens,
        decoding=sequence.decoding and sequence.output_tokens > 0,  # a prompt of one token is none
    )
    if slo is None:
        return asked
    return replace(asked, due_s=slo.due_s, tpot_s=slo.tpot_s, value=slo.value)
