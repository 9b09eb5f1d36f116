"""What a router reports of its mesh: instances, tiers, counts, traces and moves. Times are in seconds."""

from dataclasses import dataclass, field


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
class InstanceStatus:
    """One service of the mesh. state: ready, draining or ejected. place: the length stage that a worker serves.

    processes: that serve under this id and address; 1 but for routers of several processes. admin_address: of its
    administrative listener. drafting: None of a worker without drafting models.
    """

    instance_id: str
    role: str
    tier: str
    address: str
    engine: str
    state: str
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


@dataclass(frozen=True, slots=True)
class BurstChange:
    """New requests take another step of the burst ladder. at_s: Unix time. reason: load, calm, budget_spent or
    budget_recovered."""

    at_s: float
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class BurstStatus:
    """How thresholds give way to the load. step: that new requests take, of `steps`; of several processes the highest.

    mean_quality: that the mean over the window holds. window_quality: of the window's requests; None without any.
    budget_left: share of the window's budget that is not spent. out_of_budget: the load needs a step that the budget does not
    allow. arrivals_per_s: at all routers. changes: the number since the router started. last_changes: of one process, newest
    first.
    """

    step: int
    steps: int
    mean_quality: float
    window_quality: float | None
    budget_left: float
    out_of_budget: bool
    arrivals_per_s: float
    changes: int
    last_changes: tuple[BurstChange, ...] = ()


@dataclass(frozen=True, slots=True)
class MeshStatus:
    """The mesh as seen by one router.

    connected: whether Redis is reachable. state_age_s: for how long it has been unreachable. processes: of this router, if it
    has several; its counters are the sum over those that respond.
    migrations: replies that moved to another instance with their KV. advice_unmet: moves that a worker advised and that
    failed. burst: None where the plan has no burst ladder.
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
    burst: BurstStatus | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """One span of a trace. `start_s` is Unix time."""

    span_id: str
    parent_span_id: str
    name: str
    service: str
    start_s: float
    duration_s: float
    failed: bool
    status_message: str
    attributes: dict[str, str] = field(default_factory=dict)
    events: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """The result of a move. refusal: why the reply stayed at its instance; None if it moved.

    offset: output tokens generated before the move. stall_s: from the last step at the source to the first event of the
    target.
    """

    refusal: str | None
    offset: int = 0
    stall_s: float = 0.0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one request, in order of start."""

    trace_id: str
    spans: tuple[Span, ...]
