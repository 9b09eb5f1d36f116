"""Serves requests with SLOs in virtual time and says which of them were attained. No I/O.

Replicas with the SLO policy (`slo_fleet`). The denominator of an attainment is every request that
asks for an SLO: one that is dropped or served as best effort has missed it.
"""

from dataclasses import dataclass

import numpy as np

from penstock.planner_service.simulator.attainment_kernel import Slos, new_judgement
from penstock.planner_service.simulator.fleet_replica import FleetLimits, FleetRequests, Run, new_outcome
from penstock.planner_service.simulator.slo_fleet import serve_fleet
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
    that was promised one. admitted (N): promised (of a policy that knows no SLOs: every request that asks).
    """

    first_s: Floats
    finish_s: Floats
    attained: Bools
    admitted: Bools

    def attainment(self, asking: Bools) -> float:
        """The share of the requests that ask for an SLO whose SLO was attained; 1 where none asks."""
        return float(self.attained[asking].mean()) if asking.any() else 1.0


@dataclass(frozen=True, slots=True)
class SloReplicas:
    """Replicas with the SLO policy. hops: replicas that are tried after the first."""

    replica: Replica
    count: int = 1
    hops: int = 0

    @property
    def gpus(self) -> int:
        return self.count * self.replica.shape.gpus

    def serve(self, work: Workload, promises: Promises) -> Judged:
        """Serve; the lengths of replies are known to admission."""
        check_fits(work, self.replica)
        slos, judgement, out = slos_of(work, promises), new_judgement(len(work)), new_outcome(len(work), self.count)
        requests = FleetRequests(work.arrival_s, work.input_tokens, work.output_tokens, promises.tightest_s)
        limits, batch = FleetLimits(self.replica.lane_tokens, self.hops), self.replica.limits
        model = step_model(self.replica.latency, batch.max_step_tokens, places=batch.max_running)
        kept_s = KEPT_SHARE * np.unique(promises.tightest_s)
        serve_fleet(Run(requests, slos, kept_s, model, limits, judgement, out), self.count)
        asks = np.isfinite(promises.ttft_s)
        attained = out.admitted & asks & (judgement.misses == 0) & (out.finish_s > 0)
        return Judged(out.first_s, out.finish_s, attained, out.admitted)


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
