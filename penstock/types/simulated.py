"""What simulations report of requests. Times are in seconds, qualities from 0 to 100."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles and mean, in seconds."""

    p50: float
    p95: float
    p99: float
    mean: float


@dataclass(frozen=True, slots=True)
class UserLatency:
    """What users feel. first_token: until the first token that a user sees. pace: per token after the first."""

    end_to_end: Percentiles
    first_token: Percentiles
    pace: Percentiles


@dataclass(frozen=True, slots=True)
class SloAttainment:
    """What a class of requests receives. Times, admitted and attainment are None for a class without an SLO; both are
    shares of its requests. share: of all requests."""

    name: str
    share: float
    requests: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    admitted: float | None = None
    attainment: float | None = None


@dataclass(frozen=True, slots=True)
class SimulatedTier:
    """One tier of a simulation. utilisation: the share of time in which its replicas are at work."""

    name: str
    requests: int
    ttft_s: Percentiles
    tpot_s: Percentiles
    latency_s: Percentiles
    requests_per_s: float
    output_tokens_per_s: float
    utilisation: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """cached_share: of all prompt tokens, those that are cached and not computed. slo: by class, where there are some."""

    requests: int
    quality: float
    cached_share: float
    end_to_end_s: Percentiles
    user_latency_s: UserLatency
    tiers: tuple[SimulatedTier, ...]
    slo: tuple[SloAttainment, ...] = ()
