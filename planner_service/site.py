"""What a cascade is planned for: where it is to run, and what it is to serve. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from planner_service.routing.quality import JudgedSample
from planner_service.simulator import EngineLimits, Replica
from planner_service.simulator.workload import Floats
from services.domain.hardware import ClusterSpec, ModelSpec, ReplicaShape, Runtime, fit, roofline

PIPELINES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class Site:
    """Where a cascade is to run. models: by tier, in the cascade's order. judge_s: to judge one answer.

    measured: by tier, replicas whose step times were measured; a tier that has some uses only those, else a roofline.
    """

    cluster: ClusterSpec
    tiers: tuple[str, ...]
    models: tuple[ModelSpec, ...]
    runtime: Runtime = field(default_factory=Runtime)
    limits: EngineLimits = field(default_factory=EngineLimits)
    judge_s: float = 0.0
    measured: tuple[tuple[Replica, ...], ...] = ()

    def replica(self, tier: int, shape: ReplicaShape, longest_tokens: int) -> tuple[Replica | None, str]:
        """(a replica of tier `tier` with room for such a request in each lane, or None; why not)."""
        if self.measured and self.measured[tier]:
            measured = next((r for r in self.measured[tier] if r.shape == shape), None)
            if measured is None:
                return None, f"{self.tiers[tier]} has no profile for {shape}"
            room = measured.lane_tokens
            if room < longest_tokens:
                return (
                    None,
                    f"{self.tiers[tier]} was measured with KV for {room} tokens, a request has {longest_tokens}",
                )
            return measured, ""
        model = self.models[tier]
        fits = fit(model, shape, self.cluster, self.runtime, longest_tokens * shape.pp)
        if not fits.ok:
            return None, fits.reason
        return Replica(shape, roofline(model, shape, self.cluster, self.runtime), fits.kv_tokens, self.limits), ""


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What the cascade is to serve.

    judged: the whole judged sample, which decides about quality. requests: those that arrive, drawn from it, in order of
    arrival; arrival_s (N).
    """

    judged: JudgedSample
    requests: JudgedSample
    arrival_s: Floats

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self.arrival_s) else 0.0

    @property
    def rate_per_s(self) -> float | None:
        """Arrivals per second; None where they come all at once."""
        return (len(self.arrival_s) - 1) / self.seconds if self.seconds > 0 else None

    def skipping(self, skip_below: Sequence[float | None]) -> "Demand":
        """The same requests where tiers are passed over; see JudgedSample.skipping."""
        return Demand(self.judged.skipping(skip_below), self.requests.skipping(skip_below), self.arrival_s)

    def scaled(self, factor: float) -> "Demand":
        """The same requests, `factor` times as fast."""
        return Demand(self.judged, self.requests, self.arrival_s / factor)


def replica_kinds(site: Site, tier: int, gpus: int, longest_tokens: int) -> tuple[list[Replica], str]:
    """(the replicas that a tier can have on so many GPUs, why the last shape that failed did not fit)."""
    kinds, reason = [], ""
    tp = 1
    while tp <= site.cluster.gpus_per_node:
        for pp in PIPELINES:
            shape = ReplicaShape(tp, pp)
            if shape.gpus > gpus:
                continue
            replica, why = site.replica(tier, shape, longest_tokens)
            if replica is not None:
                kinds.append(replica)
            reason = why or reason
        tp *= 2
    return kinds, reason
