"""Serves requests with SLOs in virtual time and says which of them were attained. No I/O.

Replicas with the SLO policy (`slo_fleet`). The denominator of an attainment is every request that
asks for an SLO: one that is declined, dropped or served as best effort has missed it.
"""

from dataclasses import dataclass

import numpy as np

from penstock.planner_service.simulator.attainment_kernel import Slos, new_judgement
from penstock.planner_service.simulator.fleet_replica import FleetLimits, FleetRequests, Run, new_outcome
from penstock.planner_service.simulator.slo_fleet import ADMITTED, GIVEN_UP, serve_fleet
from penstock.planner_service.simulator.tier import Replica
from penstock.planner_service.simulator.workload import Bools, Floats, Ints, Workload
from penstock.services.domain.errors import invalid
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.slo.compiled.layout import KEPT_SHARE, step_model

NEVER_LATER = np.iinfo(np.int64).max


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

    reserve: share of each step that best effort has. hops: replicas that are tried after the first. decline: requests that
    no replica admits end. least_loaded: where a request goes first, else they take turns.
    """

    replica: Replica
    count: int = 1
    reserve: float = 0.0
    hops: int = 0
    decline: bool = False
    least_loaded: bool = True

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
        again_tokens: int = 0,
    ) -> Judged:
        """Serve; `predicted` (N): output tokens that admission counts with, None where the lengths are known.

        again_tokens: those that it counts with once a reply has outlived its prediction.
        """
        check_fits(work, self.replica)
        slos, judgement, n = slos_of(work, promises), new_judgement(len(work)), len(work)
        expected = work.output_tokens if predicted is None else predicted
        lengths = (work.input_tokens, work.output_tokens, expected)
        requests = FleetRequests(work.arrival_s, *lengths, promises.tightest_s)
        allowed = n if misses_allowed is None else misses_allowed
        rules = (self.hops, self.decline, self.least_loaded, allowed)
        limits = FleetLimits(self.replica.lane_tokens, *rules, again_tokens=again_tokens)
        out = new_outcome(n, self.count)
        batch = self.replica.limits
        model = step_model(self.replica.latency, batch.max_step_tokens, self.reserve, places=batch.max_running)
        kept_s = KEPT_SHARE * np.unique(promises.tightest_s)
        steps = serve_fleet(Run(requests, slos, kept_s, model, limits, judgement, out), self.count)
        admitted = out.outcome == ADMITTED
        asks = np.isfinite(promises.ttft_s)
        attained = admitted & asks & (judgement.misses == 0) & (out.finish_s > 0)
        return Judged(out.first_s, out.finish_s, attained, admitted, out.preemptions, steps == GIVEN_UP)


def slos_of(work: Workload, promises: Promises) -> Slos:
    return Slos(work.arrival_s + promises.ttft_s, promises.tpot_s, promises.later_tpot_s, promises.later_from)


def has_one_batch(shape: ReplicaShape) -> bool:
    """Whether replicas of this shape have one batch and one pool of KV, as replicas under SLOs must have."""
    return shape.pp == 1 and shape.attn_dp == 1


def check_fits(work: Workload, replica: Replica) -> None:
    if len(work) and work.longest_tokens + 1 > replica.request_tokens:
        raise invalid(
            "replica", f"a request has {work.longest_tokens} tokens, the KV has room for {replica.request_tokens - 1}"
        )
    if not has_one_batch(replica.shape):
        problem = "SLOs are simulated without pipeline stages and data-parallel attention"
        raise invalid("replica.shape", f"{problem}, not with {replica.shape}")
