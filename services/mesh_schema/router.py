"""What a mesh file says of the routers, and the share of one process in it."""

from pydantic import BaseModel, Field

from penstock.services.mesh_schema.common import FROZEN, MAX_PORT, MAX_PROCESSES

MAX_ROUTER_PROCESSES = 64  # cores of a large machine: each process keeps at most one busy


class MeshPromptSamples(BaseModel):
    """Prompts of users that routers store in Redis, as text, for `penstock measure --live`."""

    model_config = FROZEN

    share: float = Field(default=0.0, ge=0, le=1)
    """Share of the requests whose prompts are stored. Where keys are needed, only of tenants with `sample_prompts`; else of
    all clients: ask those whom it concerns before you set it. 0: none, and routers that start delete what is stored."""
    max_prompts: int = Field(default=1000, ge=1, le=10_000)
    """Prompts that are stored at most, the newest; each has up to 16 KiB."""
    max_age_s: float = Field(default=604_800.0, ge=60, le=2_592_000)
    """Prompts that are older are not read any more, and are deleted with the next one that is stored. If none is, Redis
    deletes all so long after the last one."""


class MeshRouter(BaseModel):
    """The routers."""

    model_config = FROZEN

    replicas: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Routers, each with ports of its own."""
    processes: int = Field(default=1, ge=1, le=MAX_ROUTER_PROCESSES)
    """Processes of each router, which share its ports: one for each core that the router may use. They share the router's
    limits evenly (max_active, max_waiting, max_connections, judge_concurrency, trace_per_s); each gets at least one place."""
    grpc_port: int = Field(default=50051, ge=0, le=MAX_PORT)
    """gRPC port of the first router; the next routers use the next ports. 0: any free port."""
    http_port: int = Field(default=8000, ge=0, le=MAX_PORT)
    """The same for the OpenAI-compatible API."""
    admin_port: int = Field(default=0, ge=0, le=MAX_PORT)
    """The same for the administrative listener."""
    max_active: int = Field(default=256, ge=1)
    """Requests that one router processes at once."""
    max_waiting: int = Field(default=512, ge=0)
    """Requests that may wait in the admission queue; further ones fail with RESOURCE_EXHAUSTED."""
    default_deadline_s: float = Field(default=600.0, gt=0)
    """Deadline of requests that set none."""
    write_timeout_s: float = Field(default=30.0, gt=0)
    """A request whose client does not read for this long is cancelled; the same holds for a router's call to a worker."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """Timeout for reading the body of an HTTP request; then the status is 408."""
    keepalive_timeout_s: float = Field(default=75.0, gt=0)
    """An HTTP connection is closed after this long without complete request headers, whether it is idle or slow."""
    connection_idle_s: float = Field(default=600.0, gt=0)
    """A gRPC connection without calls is closed after this long; clients reconnect by themselves."""
    max_connections: int = Field(default=4096, ge=1)
    """Connections to one router, counted separately for gRPC and HTTP; further ones are closed at once."""
    judge_timeout_s: float = Field(default=10.0, gt=0)
    """Timeout of scoring one answer, retries included. In addition, a scorer that asks a tier (`llm`) has three times as long
    as the tier needs to read prompt and answer, at the speed that its workers measure."""
    judge_concurrency: int = Field(default=64, ge=1)
    """Concurrent score requests of one router; further ones wait for at most half of judge_timeout_s."""
    judge_open_s: float = Field(default=1.0, gt=0)
    """A judge that timed out three times in a row gets no requests for this long (circuit breaker); then one request probes
    it."""
    flag_below: float | None = Field(default=None, ge=0, le=100)
    """Answers of the last tier (and of a tier that a request names) are judged at their end, too, and flagged to the client
    and counted if they score less than this. The end of a reply then waits for the judge, its tokens do not. Empty: these
    answers are not judged."""
    score_predictor: str = ""
    """File of `penstock predictor`, which predicts from a prompt the score of each tier's answer, for skip_below of tiers.
    A relative path is resolved against the mesh file's folder. Empty: no tier is passed over by prediction."""
    waiting_price: float = Field(default=0.0, ge=0, le=1000)
    """Points of score that a second of waiting costs. Under load, a tier that would delay a request is passed over sooner; an
    answer is accepted with a lower score where the next tier would delay it. 0: load does not matter."""
    waiting_points: float = Field(default=100.0, gt=0, le=100)
    """The most points of score by which waiting moves a limit: however long the queues are, no answer is accepted that scores
    less than its tier's threshold minus these."""
    worker_silence_s: float = Field(default=15.0, gt=0)
    """A worker that sends nothing on a stream for this long counts as failed for that request."""
    heartbeat_s: float = Field(default=5.0, ge=0.05)
    """A gRPC stream that has been idle for this long gets a heartbeat, so that clients can tell a slow answer from a stuck
    router; a stream over HTTP gets a comment, so that proxies do not cut it."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins, such as https://chat.example, may call the OpenAI-compatible API from a browser. `*`: all.
    Empty: none."""
    tier_wait_s: float = Field(default=30.0, ge=0)
    """How long a request waits for an instance of the last tier when there is none, and none loads its model; other tiers are
    skipped instead."""
    ejection_s: float = Field(default=2.0, ge=0)
    """How long an instance that failed is ejected: tried only after all others."""
    max_attempts: int = Field(default=8, ge=1)
    """Attempts of one request at one tier, failovers included."""
    max_deaths: int = Field(default=2, ge=1)
    """A request is given up (POISON_REQUEST) when this many workers died while they ran it: it may be the cause. A worker
    that had generated 16 tokens of the reply before it died is not counted."""
    max_refusals: int = Field(default=50, ge=1)
    """How often workers of one tier may refuse a request, because they are full or draining, before it is given up. If they
    are full, the error carries a retry delay. A worker that refused gets no requests for up to a second."""
    trace_share: float = Field(default=0.01, ge=0, le=1)
    """Share of requests that are traced. 1: all."""
    trace_per_s: float = Field(default=1.0, ge=0, le=1000)
    """Traces per second in addition to trace_share, with bursts of ten seconds' worth. It applies separately to requests
    in general, to requests whose clients ask for a trace, and to untraced requests that failed or were slow."""
    trace_slow_s: float = Field(default=30.0, gt=0)
    """An untraced request that took longer than this is slow."""
    kept_requests: int = Field(default=0, ge=0, le=1_000_000)
    """Of how many last requests of the mesh Redis keeps arrival time, prompt tokens and how many of them were cached, output
    tokens and answering tier, for `penstock export-trace`: no text, no tenant. About 100 bytes each. 0: of none."""
    sample_prompts: MeshPromptSamples = MeshPromptSamples()
    """Storing a share of the prompts of users, for `penstock measure --live`: see below. Off."""

    def share(self, index: int, count: int) -> "MeshRouter":
        """The limits of one of `count` processes of a router; they add up to the router's. index: from 0."""
        shares = {name: share_of(getattr(self, name), index, count) for name in _DIVIDED}
        divided = {name: max(_DIVIDED[name], share) for name, share in shares.items()}
        return self.model_copy(update={**divided, "trace_per_s": self.trace_per_s / count})


_DIVIDED = {"max_active": 1, "max_waiting": 0, "max_connections": 1, "judge_concurrency": 1}
"""What the processes of a router divide, and the least that each has."""


def share_of(total: int, index: int, count: int) -> int:
    """The share of the process `index`, from 0, of `count` in a total: shares differ by one at most and add up to it."""
    return total // count + (index < total % count)


def processes_problem(processes: int, router: MeshRouter) -> str:
    """Why a router cannot have so many processes; empty where it can."""
    most = router.max_active
    return f"{processes}, but router.max_active is {most}: each process needs a place" if processes > most else ""
