"""The batch scheduler: running and waiting sequences, their KV blocks, and the steps that compute them. No I/O.

Continuous batching with chunked prefill. A policy (`policies`) decides the tokens per request in each step. A caller may pass
its own allocation instead.
"""

import bisect
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from penstock.services.domain.slo.draft_windows import FIRST_PACE, DraftPace
from penstock.worker_service.scheduling.blocks import ROOT, BlockPool, Node, OutOfBlocks
from penstock.worker_service.scheduling.policies import DecodeFirst
from penstock.worker_service.scheduling.sequence import Phase, Sequence
from penstock.worker_service.scheduling.steps import BatchPolicy, Chunk, StepInProgress, StepPlan, queue_key


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """max_running: limit on requests that hold KV. max_step_tokens: limit on tokens computed in a step."""

    max_running: int
    max_step_tokens: int


@dataclass(slots=True)
class Reservation:
    """Reserved blocks for an incoming sequence. The first `present` hold its prefix; `node`: the tree node after them."""

    blocks: list[int]
    present: int
    node: Node


class BatchScheduler:
    """The waiting and running sequences of one pool of blocks.

    The loop is `plan_step`, compute, `commit`. Between these calls, only `add`, the policy's `decide(during_step=True)` and
    `finish` of a waiting sequence may be called.
    """

    def __init__(self, limits: BatchLimits, pool: BlockPool, policy: BatchPolicy | None = None) -> None:
        self.limits, self.pool, self.policy = limits, pool, policy or DecodeFirst()
        self.waiting: list[Sequence] = []
        """By priority, descending, then by order. Only the scheduler changes it, and `running`."""
        self.running: list[Sequence] = []
        """In order of admission."""
        self._by_id: dict[str, Sequence] = {}
        self._orders = 0
        self._reserved = 0  # number of reservations; each counts as running
        self.preemptions = 0

    @property
    def free_places(self) -> int:
        """How many more sequences may run; places set aside for those on their way count as taken."""
        return self.limits.max_running - len(self.running) - self._reserved

    @property
    def idle(self) -> bool:
        return not self._by_id

    def get(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            ValueError: Its id is in use.
        """
        self._check_new(sequence)
        self._register(sequence)
        self._queue(sequence)
        self.policy.added(sequence)

    def reserve(self, tokens: Seq[int], cache_salt: str = ROOT) -> Reservation:
        """Reserve blocks for an incoming sequence with the KV of `tokens`. No request is preempted.

        Raises:
            OutOfBlocks: There is no room; nothing has changed.
        """
        if self.free_places < 1:
            raise OutOfBlocks("the limit on running requests is reached")
        match = self.pool.match(tokens, cache_salt)
        needed = -(-len(tokens) // self.pool.block_tokens) - len(match.blocks)
        if not self.pool.can_take(match, needed):
            raise OutOfBlocks(f"{needed} blocks are needed, {self.pool.free} free")
        self.pool.hold(match.blocks)
        self._reserved += 1
        return Reservation([*match.blocks, *self.pool.take(needed)], len(match.blocks), match.node)

    def extend(self, reservation: Reservation, blocks: int) -> None:
        """Extend a reservation to at least this many blocks.

        Raises:
            OutOfBlocks: They are not free; nothing has changed.
        """
        if blocks > len(reservation.blocks):
            reservation.blocks += self.pool.take(blocks - len(reservation.blocks))

    def release(self, reservation: Reservation) -> None:
        """Release a reservation."""
        self.pool.release(reservation.blocks)
        self._reserved -= 1

    def adopt(self, sequence: Sequence, reservation: Reservation, computed: int) -> None:
        """Start a sequence whose first `computed` tokens have their KV in the blocks of the reservation.

        Raises:
            ValueError: Its id is in use, or the blocks do not match; nothing has changed.
        """
        self._check_new(sequence)
        if not 0 < computed < len(sequence.tokens):
            raise ValueError(f"KV of 1 to {len(sequence.tokens) - 1} tokens can be adopted, not {computed}")
        if len(reservation.blocks) != -(-computed // self.pool.block_tokens):
            raise ValueError(f"{len(reservation.blocks)} blocks for {computed} tokens")
        self._reserved -= 1
        self._register(sequence)
        sequence.blocks, sequence.computed = reservation.blocks, computed
        sequence.sealed, sequence.node = reservation.present, reservation.node
        sequence.phase = Phase.RUNNING
        self.running.append(sequence)
        self.seal(sequence)
        self.policy.added(sequence)

    def seal(self, sequence: Sequence) -> None:
        """Add the full blocks of a sequence to the prefix tree. Their KV must be computed."""
        size = self.pool.block_tokens
        while (sequence.sealed + 1) * size <= sequence.computed:
            at = sequence.sealed
            tokens = sequence.tokens[at * size : (at + 1) * size]
            sequence.node = self.pool.seal(sequence.blocks[at], sequence.node, tokens)
            sequence.sealed += 1

    def finish(self, request_id: str) -> Sequence | None:
        """Remove a sequence that has ended or moved; None if it is unknown."""
        sequence = self._by_id.pop(request_id, None)
        if sequence is None:
            return None
        if sequence.phase is Phase.RUNNING:
            self.running.remove(sequence)
            self._release_blocks(sequence)
        else:
            self.waiting.remove(sequence)
        self.policy.finished(sequence)
        sequence.phase = Phase.FINISHED
        return sequence

    def plan_step(self, now_s: float = 0.0) -> StepPlan:
        """Plan the step that begins now, by the policy."""
        step = StepInProgress(self, self.limits.max_step_tokens)
        self.policy.plan(step, now_s)
        return step.plan()

    def proposal_limits(self, plan: StepPlan, pace: Callable[[], DraftPace] = lambda: FIRST_PACE) -> Mapping[str, int]:
        """How many tokens may be proposed in a step, by request; only requests that may propose any.

        Proposals take what the step's budget leaves, in equal shares, and no more than the reply may still have after the
        token that the step yields anyway. The policy may allow less.

        pace: what drafts are worth now.
        """
        able = [chunk.sequence for chunk in plan.chunks if chunk.may_propose]
        share = (self.limits.max_step_tokens - plan.tokens) // max(1, len(able))
        limits = {s.request_id: min(share, s.max_output_tokens - s.output_tokens - 1) for s in able}
        limits = {request_id: limit for request_id, limit in limits.items() if limit > 0}
        return self.policy.proposal_limits(self, limits, pace)

    def propose(self, plan: StepPlan, proposals: Mapping[str, Seq[int]]) -> StepPlan:
        """The step with proposed tokens, by request, as far as free blocks hold them. No request is preempted for them.

        proposals: within the step's `proposal_limits`.
        """
        if not proposals:
            return plan
        chunks = list[Chunk]()
        for chunk in plan.chunks:
            tokens = proposals.get(chunk.sequence.request_id, ())
            if tokens:
                tokens = tokens[: self._extend_for(chunk, len(tokens))]
            if tokens:
                chunk = replace(chunk, logits=1 + len(tokens), proposed=tuple(tokens))
            chunks.append(chunk)
        self.policy.proposed(chunks)
        return StepPlan(tuple(chunks), plan.preempted)

    def _extend_for(self, chunk: Chunk, proposed: int) -> int:
        """Take free blocks for tokens behind a chunk; how many tokens have room then."""
        sequence, size = chunk.sequence, self.pool.block_tokens
        end = chunk.start + chunk.count
        missing = -(-(end + proposed) // size) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += self.pool.take(min(missing, self.pool.free))
        return min(proposed, len(sequence.blocks) * size - end)

    def commit(self, plan: StepPlan, sampled: Mapping[str, Seq[int]], end_s: float = 0.0) -> None:
        """Apply a step that ended at `end_s`. `sampled`: new tokens of each request with logits (none for verifications).

        Of a chunk with proposed tokens, the new tokens are those that are accepted and the one after them.
        """
        for chunk in plan.chunks:
            sequence, tokens = chunk.sequence, sampled.get(chunk.sequence.request_id, ())
            sequence.tokens.extend(tokens)
            sequence.computed = chunk.start + chunk.count
            if chunk.proposed:
                sequence.computed += len(tokens) - 1
            self._release_surplus(sequence)
            self.seal(sequence)
        self.policy.committed(plan.chunks, end_s)

    def _release_surplus(self, sequence: Sequence) -> None:
        """Release the blocks after a sequence's computed tokens: their tokens were not accepted."""
        used = -(-sequence.computed // self.pool.block_tokens)
        if used < len(sequence.blocks):
            self.pool.release(sequence.blocks[used:])
            del sequence.blocks[used:]

    def start(self, sequence: Sequence) -> bool:
        """Admit a waiting sequence and reuse its cached prefix; False if there is no room for all its tokens."""
        if self.free_places < 1:
            return False
        pool = self.pool
        match = pool.match(sequence.tokens[:-1], sequence.cache_salt)  # the last token is always computed
        needed = -(-len(sequence.tokens) // pool.block_tokens) - len(match.blocks)
        if not pool.can_take(match, needed):
            return False
        pool.hold(match.blocks)
        sequence.blocks = list(match.blocks)
        sequence.computed, sequence.sealed, sequence.node = match.tokens, len(match.blocks), match.node
        if sequence.preemptions == 0:
            sequence.cached_prompt_tokens = min(match.tokens, sequence.prompt_tokens)
        self.waiting.remove(sequence)
        sequence.phase = Phase.RUNNING
        self.running.append(sequence)
        return True

    def add_chunk(self, sequence: Sequence, limit: int, chunks: list[Chunk], preempted: list[str]) -> int:
        """Give `sequence` up to `limit` tokens, preempting others if necessary; return the number."""
        if sequence.phase is not Phase.RUNNING or sequence.paused:
            return 0
        there, computed = len(sequence.tokens), sequence.computed
        count = there - computed
        if limit < count:
            count = limit
        if count < 1:
            return 0
        end = computed + count
        needed = -(-end // self.pool.block_tokens) - len(sequence.blocks)
        if needed > 0:
            while needed > self.pool.free:
                victim = self._victim(chunks)
                if victim is None or victim is sequence:
                    if victim is sequence:
                        self.preempt(sequence, preempted)
                    return 0
                self.preempt(victim, preempted)
            sequence.blocks += self.pool.take(needed)
        chunks.append(Chunk(sequence, computed, count, int(end == there)))
        return count

    def _victim(self, chunks: list[Chunk]) -> Sequence | None:
        """The request to preempt: of the lowest priority, the last one admitted; not in this step and not migrating."""
        busy = {id(chunk.sequence) for chunk in chunks}
        able = [s for s in self.running if id(s) not in busy and not s.paused]
        if not able:
            return None
        return max(able, key=self.policy.victim_key)

    def preempt(self, sequence: Sequence, preempted: list[str]) -> None:
        """Have a running sequence give up its blocks and wait again; its tokens stay."""
        self.running.remove(sequence)
        self._release_blocks(sequence)
        self.policy.preempted(sequence)
        sequence.phase = Phase.WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        preempted.append(sequence.request_id)
        self._queue(sequence)

    def _release_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.sealed = 0
        sequence.node = sequence.cache_salt

    def _check_new(self, sequence: Sequence) -> None:
        if sequence.request_id in self._by_id:
            raise ValueError(f"{sequence.request_id} is already in the engine")

    def _register(self, sequence: Sequence) -> None:
        sequence.order = self._orders
        self._orders += 1
        self._by_id[sequence.request_id] = sequence

    def _queue(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=queue_key)
