"""What a router reports of its mesh: instances, tiers, counts, traces and moves. Times are in seconds."""

import enum
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from operator import add


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier as seen by a router. answered, escalated: counts of this router since it started.

    accepted_draft_tokens, rejected_draft_tokens: the same of its answers, as in Usage.
    """

    name: str
    model: str
    threshold: float | None
    planned_instances: int
    live_instances: int
    running: int
    queued: int
    output_tokens_per_s: float
    answered: int
    escalated: int
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StagePlace:
    """The length stage of an instance, numbered from 0, for sequences of from_tokens to to_tokens - 1 tokens."""

    stage: int
    from_tokens: int
    to_tokens: int


@dataclass(frozen=True, slots=True)
class Drafting:
    """What drafts at a worker. chain: the models that draft now, small to large; empty while none does. window: how many
    tokens the first one drafts for a reply in a step. accepted_share: of the last drafted tokens, 0 to 1; None before the
    first."""

    chain: tuple[str, ...] = ()
    window: int = 0
    accepted_share: float | None = None


@dataclass(frozen=True, slots=True)
class Loading:
    """A worker that loads its model. share: of the weights, 0 to 1. left_s: until all are loaded, about; None: not known."""

    share: float = 0.0
    left_s: float | None = None

    def __str__(self) -> str:
        left = "" if self.left_s is None else f", about {self.left_s:.0f} s left"
        return f"{self.share:.0%}{left}"


class InstanceState(enum.StrEnum):
    """EJECTED: a call to it failed recently, or its lease has expired: others are tried first. LOADING: it takes no requests
    yet. UNREACHED: a worker or judge that has not answered yet at the address that it advertises."""

    READY = "ready"
    DRAINING = "draining"
    EJECTED = "ejected"
    LOADING = "loading"
    UNREACHED = "unreached"
    UNKNOWN = "unknown"  # of a later version


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """One service of the mesh. place: the length stage that a worker serves.

    processes: that serve under this id and address; 1 but for routers of several processes. admin_address: of its
    administrative listener. drafting: None of a worker without drafting models. loading: of a worker that loads.
    leads: of several planners, the one that plans again, and restores the plan. shape: of a worker, as in plans; empty where
    it is not the mesh that decides.
    """

    instance_id: str
    role: str
    tier: str
    address: str
    engine: str
    state: InstanceState
    running: int
    queued: int
    free_kv_blocks: int
    kv_blocks: int
    output_tokens_per_s: float
    age_s: float
    place: StagePlace | None = None
    processes: int = 1
    admin_address: str = ""
    drafting: Drafting | None = None
    loading: Loading | None = None
    leads: bool = False
    shape: str = ""


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What the requests of one key used at one tier. requests: replies of the tier, accepted or not.

    tier_s: time that requests spent at the tier, summed. cost: by the prices of the mesh file; 0 without prices.
    compute_s: seconds of GPUs (of engines, on CPUs), as far as instances know them.
    """

    tenant: str
    key_id: str
    tier: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    tier_s: float
    cost: float
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A finished request of the cascade, without text and tenant. arrival_s: Unix time.

    output_tokens: of the accepted answer. tier: the one that gave it. cached_prompt_tokens: of the prompt, those that this
    tier found in its prefix cache.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tier: str
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RouterProcessStatus:
    """One of a router's processes. answering: False while it starts or is stuck; no sum has what it counts then."""

    index: int
    instance_id: str
    answering: bool
    active: int
    waiting: int
    finished: int


@dataclass(frozen=True, slots=True)
class SloCounts:
    """Requests with an SLO that have ended. attained, broken: a worker had promised to keep it."""

    attained: int = 0
    broken: int = 0
    best_effort: int = 0
    declined: int = 0

    def __add__(self, other: "SloCounts") -> "SloCounts":
        return SloCounts(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class MeshStatus:
    """The mesh as seen by one router.

    connected: whether Redis is reachable. state_age_s: for how long it has been unreachable. processes: of this router, if it
    has several; its counters are the sum over those that respond.
    migrations: replies that moved to another instance with their KV. advice_unmet: moves that a worker advised and that
    failed. warnings: what an operator should know of the configuration.
    """

    router_id: str
    plan_revision: int
    connected: bool
    state_age_s: float
    tiers: tuple[TierStatus, ...]
    instances: tuple[InstanceStatus, ...]
    active: int
    waiting: int
    finished: int
    failed: int
    rejected: int
    failovers: int
    requests_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    migrations: int = 0
    advice_unmet: int = 0
    processes: tuple[RouterProcessStatus, ...] = ()
    slo: SloCounts = field(default_factory=SloCounts)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """after_s: the span's start."""

    name: str
    after_s: float
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """One span of a trace. `start_s` is Unix time."""

    span_id: str
    parent_span_id: str
    name: str
    service: str
    start_s: float
    duration_s: float
    failed: bool = False
    status_message: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one request, in order of start."""

    trace_id: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class ReplyMoved:
    """A reply has moved. offset: output tokens generated before. stall_s: from the last step at the source to the first event
    of the target."""

    offset: int
    stall_s: float
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessCounters:
    """Counters since the process started. ttft_s: times to first token of its last requests, in no particular order.

    answered, escalated: requests by tier whose answer was accepted, and that were escalated. accepted_draft_tokens,
        rejected_draft_tokens: by tier, as in Usage. listening: whether the process
        accepts new connections.
    """

    active: int = 0
    waiting: int = 0
    finished: int = 0
    failed: int = 0
    rejected: int = 0
    failovers: int = 0
    migrations: int = 0
    advice_unmet: int = 0
    requests_per_s: float = 0.0
    ttft_s: tuple[float, ...] = ()
    answered: Mapping[str, int] = field(default_factory=dict)
    escalated: Mapping[str, int] = field(default_factory=dict)
    accepted_draft_tokens: Mapping[str, int] = field(default_factory=dict)
    rejected_draft_tokens: Mapping[str, int] = field(default_factory=dict)
    listening: bool = False
    slo: SloCounts = field(default_factory=SloCounts)

    def ttft_percentile(self, share: float) -> float:
        """Percentile of the times to first token, in seconds; 0 without requests. share: from 0 to 1."""
        ordered = sorted(self.ttft_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that requests can name. id: the name. model: of the tier; empty for the cascade. max_context_tokens: 0 where no
    worker serves it now."""

    id: str
    model: str
    cascade: bool
    max_context_tokens: int
