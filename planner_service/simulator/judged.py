"""Serves requests with SLOs in virtual time and says which of them were attained. No I/O.

Three deployments: replicas with the SLO policy (`slo_fleet`), replicas with prefill-first or decode-first batches
(`judged_replica`), and prompts and decodes on replicas of their own. The denominator of an attainment is every request that
asks for an SLO: one that is declined, dropped or served as best effort has missed it.
"""

import enum
from dataclasses import dataclass

import numpy as np

from planner_service.simulator.attainment_kernel import Judgement, Slos, new_judgement
from planner_service.simulator.batch_step import DECODE_FIRST, PREFILL_FIRST, Engine
from planner_service.simulator.drafts import drafts_of
from planner_service.simulator.fleet_replica import FleetLimits, FleetOutcome, FleetRequests
from planner_service.simulator.judged_replica import GIVEN_UP, serve_judged
from planner_service.simulator.slo_fleet import ADMITTED, serve_fleet
from planner_service.simulator.speculation import SimulatedDrafter
from planner_service.simulator.tier import Replica
from planner_service.simulator.workload import Bools, Floats, Ints, Workload
from services.domain.errors import invalid
from services.domain.hardware import ReplicaShape
from services.domain.slo.compiled.layout import step_model

UNPROMISED_TPOT_S = 0.1  # how long a reply without a promised pace is assumed to stay, for the choice of a replica
NEVER_LATER = np.iinfo(np.int64).max


class BatchPolicy(enum.Enum):
    """The policies of a tier's batches that know no SLOs, by their names in the mesh file."""

    DECODE_FIRST = "decode_first"
    PREFILL_FIRST = "prefill_first"

    @property
    def number(self) -> int:
        """In `batch_step`."""
        return PREFILL_FIRST if self is BatchPolicy.PREFILL_FIRST else DECODE_FIRST


@dataclass(frozen=True, slots=True, eq=False)
class Promises:
    """The SLOs of N requests, in seconds; infinite for none.

    ttft_s (N): from arrival to the first token; where it is infinite, a request asks for best effort. tpot_s (N): per output
    token. later_tpot_s, later_from (N): the pace from that output token on, for replies of two phases.
    """

    ttft_s: Floats
    tpot_s: Floats
    later_tpot_s: Floats
    later_from: Ints

    @classmethod
    def of_one_phase(cls, ttft_s: Floats, tpot_s: Floats) -> "Promises":
        return cls(ttft_s, tpot_s, tpot_s, np.full(len(ttft_s), NEVER_LATER))

    def check(self, work: Workload) -> None:
        """Raises InvalidRequest where lengths differ or a time is not positive."""
        for name in ("ttft_s", "tpot_s", "later_tpot_s", "later_from"):
            values = getattr(self, name)
            if len(values) != len(work) or not (values > 0).all():
                raise invalid(f"promises.{name}", f"must be {len(work)} numbers greater than 0")

    def subset(self, chosen: Ints) -> "Promises":
        return Promises(self.ttft_s[chosen], self.tpot_s[chosen], self.later_tpot_s[chosen], self.later_from[chosen])

    @property
    def tightest_s(self) -> Floats:
        return np.minimum(self.tpot_s, self.later_tpot_s)


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """What N requests received.

    first_s, finish_s (N): when the first and the last token came; 0 for none. attained (N): the SLO was kept, by a request
    that was promised one. admitted (N): promised (of a policy that knows no SLOs: every request that asks). preemptions (N).
    abandoned: more requests missed than were allowed; then the rest is not simulated.
    """

    first_s: Floats
    finish_s: Floats
    attained: Bools
    admitted: Bools
    preemptions: Ints
    abandoned: bool

    def attainment(self, asking: Bools) -> float:
        """The share of the requests that ask for an SLO whose SLO was attained; 1 where none asks."""
        return float(self.attained[asking].mean()) if asking.any() else 1.0


@dataclass(frozen=True, slots=True)
class SloReplicas:
    """Replicas with the SLO policy.

    reserve: share of each step that best effort has. hops: replicas that are tried behind the first. decline: requests that
    no replica admits end. least_loaded: where a request goes first, else they take turns. drafter: of tokens for promised
    replies; its own use of time for prompts, and of memory, is for `replica` to count.
    """

    replica: Replica
    count: int = 1
    reserve: float = 0.0
    hops: int = 0
    hop_s: float = 0.001
    decline: bool = False
    least_loaded: bool = True
    drafter: SimulatedDrafter | None = None

    @property
    def gpus(self) -> int:
        return self.count * self.replica.shape.gpus

    def serve(
        self,
        work: Workload,
        promises: Promises,
        *,
        misses_allowed: int | None = None,
        predicted: Ints | None = None,
        value: Floats | None = None,
    ) -> Judged:
        """Serve; `predicted` (N): output tokens that admission counts with, None where the lengths are known."""
        promises.check(work)
        _check_fits(work, self.replica)
        slos, judgement, n = _slos(work, promises), new_judgement(len(work)), len(work)
        requests = FleetRequests(
            work.arrival_s,
            work.input_tokens,
            work.output_tokens,
            work.output_tokens if predicted is None else predicted,
            promises.tightest_s,
            np.ones(n) if value is None else value,
        )
        limits = FleetLimits(
            self.replica.lane_tokens,
            self.replica.limits.max_running,
            self.hops,
            self.hop_s,
            self.decline,
            self.least_loaded,
            n if misses_allowed is None else misses_allowed,
            drafts_of(self.drafter),
        )
        out = FleetOutcome(*np.zeros((2, n)), *np.zeros((3, n), np.int64))
        model = step_model(self.replica.latency, self.replica.limits.max_step_tokens, self.reserve)
        steps = serve_fleet(requests, slos, np.unique(promises.tightest_s), model, self.count, limits, judgement, out)
        admitted = out.outcome == ADMITTED
        asks = np.isfinite(promises.ttft_s)
        attained = admitted & asks & (judgement.misses == 0) & (out.finish_s > 0)
        return Judged(out.first_s, out.finish_s, attained, admitted, out.preemptions, steps == GIVEN_UP)


@dataclass(frozen=True, slots=True)
class PlainReplicas:
    """Replicas whose policy knows no SLOs. drop_late: a request whose first token is late already is given up. drafter: as of
    SloReplicas, for all decodes."""

    replica: Replica
    policy: BatchPolicy
    count: int = 1
    drop_late: bool = False
    drafter: SimulatedDrafter | None = None

    @property
    def gpus(self) -> int:
        return self.count * self.replica.shape.gpus

    def serve(self, work: Workload, promises: Promises, *, misses_allowed: int | None = None) -> Judged:
        """A request goes to the replica whose prompts before it are computed first."""
        promises.check(work)
        _check_fits(work, self.replica)
        run = _Run(work, promises, misses_allowed, self.drafter)
        engine = _engine(self.replica, self.policy)
        for rows in _least_loaded(work.arrival_s, _prompt_s(work, self.replica), self.count):
            arrays = (work.arrival_s[rows], work.input_tokens[rows], work.output_tokens[rows])
            if not run.serve(rows, *arrays, np.zeros(len(rows), np.int64), engine, self.replica, self.drop_late):
                break
        return run.result()


@dataclass(frozen=True, slots=True)
class Disaggregated:
    """Prompts on replicas of their own, first come first served; then each request's KV moves to a replica that decodes.

    transfer_token_s: seconds that the KV of a token takes to move. Both kinds choose the least loaded replica.
    """

    replica: Replica
    prefill: int
    decode: int
    transfer_token_s: float
    drafter: SimulatedDrafter | None = None

    @property
    def gpus(self) -> int:
        return (self.prefill + self.decode) * self.replica.shape.gpus

    def serve(self, work: Workload, promises: Promises, *, misses_allowed: int | None = None) -> Judged:
        promises.check(work)
        _check_fits(work, self.replica)
        run = _Run(work, promises, misses_allowed, self.drafter)
        engine = _engine(self.replica, BatchPolicy.PREFILL_FIRST)
        for rows in _least_loaded(work.arrival_s, _prompt_s(work, self.replica), self.prefill):
            ones = np.ones(len(rows), np.int64)
            arrays = (work.arrival_s[rows], work.input_tokens[rows], ones)
            if not run.serve(rows, *arrays, np.zeros(len(rows), np.int64), engine, self.replica, False):
                return run.result()
        more: Ints = np.flatnonzero(work.output_tokens > 1)
        moved_s: Floats = run.finish_s + self.transfer_token_s * work.input_tokens
        more = more[np.argsort(moved_s[more], kind="stable")]
        engine = _engine(self.replica, BatchPolicy.DECODE_FIRST)
        paces = np.where(np.isfinite(promises.tightest_s), promises.tightest_s, UNPROMISED_TPOT_S)
        stay_s: Floats = work.output_tokens[more].astype(np.float64) * paces[more]
        first_s = run.first_s.copy()
        for places in _least_resident(moved_s[more], stay_s, self.decode):
            rows = more[places]
            arrays = (moved_s[rows], work.input_tokens[rows] + 1, work.output_tokens[rows] - 1)
            if not run.serve(rows, *arrays, work.input_tokens[rows].copy(), engine, self.replica, False):
                break
        run.first_s[:] = first_s
        return run.result()


class _Run:
    """A simulation by parts: the requests of each replica in turn, their judgement kept in between."""

    def __init__(
        self, work: Workload, promises: Promises, misses_allowed: int | None, drafter: SimulatedDrafter | None
    ) -> None:
        n = len(work)
        self._drafts = drafts_of(drafter)
        self._slos, self._judgement = _slos(work, promises), new_judgement(n)
        self._output = work.output_tokens
        self._allowed = n if misses_allowed is None else misses_allowed
        self._asks = np.isfinite(promises.ttft_s)
        self.first_s, self.finish_s = np.zeros(n), np.zeros(n)
        self._abandoned = False

    def serve(
        self,
        rows: Ints,
        arrival_s: Floats,
        prompt: Ints,
        output: Ints,
        computed: Ints,
        engine: Engine,
        replica: Replica,
        drop_late: bool,
    ) -> bool:
        """Serve the requests `rows`; False where too many have missed."""
        whole, due = self._judgement, self._slos
        slos = Slos(due.first_due_s[rows], due.tpot_s[rows], due.later_tpot_s[rows], due.later_from[rows])
        judgement = Judgement(whole.tokens[rows], whole.allowed_s[rows], whole.lead_s[rows], whole.misses[rows])
        first_s, finish_s = np.zeros(len(rows)), np.zeros(len(rows))
        before = int((self._judgement.misses > 0).sum())
        steps = serve_judged(
            arrival_s,
            prompt,
            output,
            computed,
            slos,
            judgement,
            engine,
            replica.lane_blocks,
            drop_late,
            self._allowed - before,
            first_s,
            finish_s,
            self._drafts,
        )
        whole.tokens[rows], whole.allowed_s[rows] = judgement.tokens, judgement.allowed_s
        whole.lead_s[rows], whole.misses[rows] = judgement.lead_s, judgement.misses
        self.first_s[rows], self.finish_s[rows] = first_s, finish_s
        self._abandoned = steps == GIVEN_UP
        return not self._abandoned

    def result(self) -> Judged:
        done = (self.finish_s > 0) & (self._judgement.tokens == self._output)
        attained = self._asks & done & (self._judgement.misses == 0)
        return Judged(self.first_s, self.finish_s, attained, self._asks, np.zeros(len(done), np.int64), self._abandoned)


def _slos(work: Workload, promises: Promises) -> Slos:
    return Slos(work.arrival_s + promises.ttft_s, promises.tpot_s, promises.later_tpot_s, promises.later_from)


def _engine(replica: Replica, policy: BatchPolicy) -> Engine:
    limits, latency = replica.limits, replica.latency
    return Engine(
        np.array([limits.block_tokens, limits.max_running, limits.max_step_tokens, policy.number], np.int64),
        np.array([latency.context_token_s, latency.pair_s, latency.gap_s, 0.0]),
        np.array(latency.knot_tokens),
        np.array(latency.knot_s),
    )


def has_one_batch(shape: ReplicaShape) -> bool:
    """Whether replicas of this shape have one batch and one pool of KV, as replicas under SLOs must have."""
    return shape.pp == 1 and shape.attn_dp == 1


def _check_fits(work: Workload, replica: Replica) -> None:
    if len(work) and work.longest_tokens + 1 > replica.request_tokens:
        raise invalid(
            "replica", f"a request has {work.longest_tokens} tokens, the KV has room for {replica.request_tokens - 1}"
        )
    if not has_one_batch(replica.shape):
        problem = "SLOs are simulated without pipeline stages and data-parallel attention"
        raise invalid("replica.shape", f"{problem}, not with {replica.shape}")


def _prompt_s(work: Workload, replica: Replica) -> Floats:
    """(N) seconds that each prompt takes by itself."""
    model = replica.latency
    return np.array([model.base_s(float(p)) + model.pair_s * p * p / 2 for p in work.input_tokens])


def _least_loaded(arrival_s: Floats, work_s: Floats, replicas: int) -> list[Ints]:
    """The requests of each replica, each of which goes where the work before it ends first."""
    ends_s, rows = [0.0] * replicas, [list[int]() for _ in range(replicas)]
    for r, (at_s, took_s) in enumerate(zip(arrival_s.tolist(), work_s.tolist(), strict=True)):
        i = min(range(replicas), key=lambda i: ends_s[i])
        ends_s[i] = max(ends_s[i], at_s) + took_s
        rows[i].append(r)
    return [np.array(row, np.int64) for row in rows]


def _least_resident(arrival_s: Floats, stay_s: Floats, replicas: int) -> list[Ints]:
    """The requests of each replica, each of which goes where the fewest are, if each stays as long as its pace allows."""
    until: list[list[float]] = [[] for _ in range(replicas)]
    rows = [list[int]() for _ in range(replicas)]
    for r, (at_s, takes_s) in enumerate(zip(arrival_s.tolist(), stay_s.tolist(), strict=True)):
        until = [[end for end in ends if end > at_s] for ends in until]
        i = min(range(replicas), key=lambda i: len(until[i]))
        until[i].append(at_s + takes_s)
        rows[i].append(r)
    return [np.array(row, np.int64) for row in rows]


Deployment = SloReplicas | PlainReplicas | Disaggregated
