"""Deployments whose policies know no SLOs, in virtual time, judged by them: what `slo_capacity` compares with.

Replicas with prefill-first or decode-first batches (`judged_replica`), and prompts and decodes on replicas of their own.
"""

import enum
from dataclasses import dataclass

import numpy as np

from benchmarks.judged_replica import GIVEN_UP, serve_judged
from penstock.planner_service.simulator.attainment_kernel import Judgement, Slos, new_judgement
from penstock.planner_service.simulator.batch_step import COUNTERS, DECODE_FIRST, PREFILL_FIRST, Engine, Outcome
from penstock.planner_service.simulator.judged import Judged, Promises, SloReplicas, check_fits, slos_of
from penstock.planner_service.simulator.tier import Replica
from penstock.planner_service.simulator.workload import Floats, Ints, Workload

UNPROMISED_TPOT_S = 0.1  # how long a reply without a promised pace is assumed to stay, for the choice of a replica


class BatchPolicy(enum.Enum):
    """The policies of a tier's batches that know no SLOs, by their names in the mesh file."""

    DECODE_FIRST = "decode_first"
    PREFILL_FIRST = "prefill_first"

    @property
    def number(self) -> int:
        """In `batch_step`."""
        return PREFILL_FIRST if self is BatchPolicy.PREFILL_FIRST else DECODE_FIRST


@dataclass(frozen=True, slots=True)
class PlainReplicas:
    """Replicas whose policy knows no SLOs. drop_late: a request whose first token is late already is given up."""

    replica: Replica
    policy: BatchPolicy
    count: int = 1
    drop_late: bool = False

    @property
    def gpus(self) -> int:
        return self.count * self.replica.shape.gpus

    def serve(self, work: Workload, promises: Promises, *, misses_allowed: int | None = None) -> Judged:
        """A request goes to the replica whose prompts before it are computed first."""
        check_fits(work, self.replica)
        run = _Run(work, promises, misses_allowed)
        engine = self.replica.engine(self.policy.number)
        for rows in _least_loaded(work.arrival_s, _prompt_s(work, self.replica), self.count):
            if not run.serve(rows, work.uncached().subset(rows), engine, self.drop_late):
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

    @property
    def gpus(self) -> int:
        return (self.prefill + self.decode) * self.replica.shape.gpus

    def serve(self, work: Workload, promises: Promises, *, misses_allowed: int | None = None) -> Judged:
        check_fits(work, self.replica)
        run = _Run(work, promises, misses_allowed)
        engine = self.replica.engine(PREFILL_FIRST)
        for rows in _least_loaded(work.arrival_s, _prompt_s(work, self.replica), self.prefill):
            prompts = Workload(work.arrival_s[rows], work.input_tokens[rows], np.ones(len(rows), np.int64))
            if not run.serve(rows, prompts, engine):
                return run.result()
        more: Ints = np.flatnonzero(work.output_tokens > 1)
        moved_s: Floats = run.finish_s + self.transfer_token_s * work.input_tokens
        more = more[np.argsort(moved_s[more], kind="stable")]
        engine = self.replica.engine(DECODE_FIRST)
        paces = np.where(np.isfinite(promises.tightest_s), promises.tightest_s, UNPROMISED_TPOT_S)
        stay_s: Floats = work.output_tokens[more].astype(np.float64) * paces[more]
        first_s = run.first_s.copy()
        for places in _least_resident(moved_s[more], stay_s, self.decode):
            rows = more[places]
            prompt = work.input_tokens[rows]
            decodes = Workload(moved_s[rows], prompt + 1, work.output_tokens[rows] - 1, cached_tokens=prompt)
            if not run.serve(rows, decodes, engine):
                break
        run.first_s[:] = first_s
        return run.result()


class _Run:
    """A simulation by parts: the requests of each replica in turn, their judgement kept in between."""

    def __init__(self, work: Workload, promises: Promises, misses_allowed: int | None) -> None:
        n = len(work)
        self._slos, self._judgement = slos_of(work, promises), new_judgement(n)
        self._output = work.output_tokens
        self._allowed = n if misses_allowed is None else misses_allowed
        self._asks = np.isfinite(promises.ttft_s)
        self.first_s, self.finish_s = np.zeros(n), np.zeros(n)

    def serve(self, rows: Ints, work: Workload, engine: Engine, drop_late: bool = False) -> bool:
        """Serve `rows` of all requests, or the part `work` of what they ask for; False where too many have missed."""
        whole, due = self._judgement, self._slos
        slos = Slos(due.first_due_s[rows], due.tpot_s[rows], due.later_tpot_s[rows], due.later_from[rows])
        judgement = Judgement(whole.tokens[rows], whole.allowed_s[rows], whole.lead_s[rows], whole.misses[rows])
        out = Outcome(np.zeros(len(rows)), np.zeros(len(rows)), np.zeros(COUNTERS))
        allowed = self._allowed - int((whole.misses > 0).sum())
        steps = serve_judged(work.arrivals, slos, judgement, engine, drop_late, allowed, out)
        whole.tokens[rows], whole.allowed_s[rows] = judgement.tokens, judgement.allowed_s
        whole.lead_s[rows], whole.misses[rows] = judgement.lead_s, judgement.misses
        self.first_s[rows], self.finish_s[rows] = out.first_s, out.finish_s
        return bool(steps != GIVEN_UP)

    def result(self) -> Judged:
        done = (self.finish_s > 0) & (self._judgement.tokens == self._output)
        attained = self._asks & done & (self._judgement.misses == 0)
        return Judged(self.first_s, self.finish_s, attained, self._asks)


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


def served(deployment: Deployment, work: Workload, promises: Promises, misses_allowed: int) -> Judged:
    """Serve; deployments that know no SLOs give up once more requests missed, and attain none of the rest."""
    if isinstance(deployment, SloReplicas):
        return deployment.serve(work, promises)
    return deployment.serve(work, promises, misses_allowed=misses_allowed)
