"""Settings: the mesh file first, then the environment over it. The only module of the services that reads either.

A value that does not fit ends the process at boot with the name of the field.
"""

import difflib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from services.domain.errors import FieldProblem, InvalidRequest
from services.domain.plans import JudgeUnavailable, Plan, Provenance, TierPlan

FIELDS_ALONE = "fields alone"  # the validation context in which a mesh file's fields need not agree
_FROZEN = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SettingsError(Exception):
    """The settings cannot be used; the message names every field at fault, and `problems` says the same in parts."""

    def __init__(self, message: str, problems: Sequence[FieldProblem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (FieldProblem("", message),)


class _FieldsDisagree(ValueError):
    """Fields that are sound by themselves and not together."""

    def __init__(self, *problems: FieldProblem) -> None:
        super().__init__("; ".join(f"{p.field}: {p.problem}" for p in problems))
        self.problems = problems


class SimulatedMeshEngine(BaseModel):
    """The simulated engine's latency model: T(step) = overhead + token * tokens + context * context tokens."""

    model_config = _FROZEN

    overhead_ms: float = Field(default=5.0, ge=0)
    """Milliseconds that every step costs."""
    token_us: float = Field(default=50.0, ge=0)
    """Microseconds per new token in a step."""
    context_token_ns: float = Field(default=20.0, ge=0)
    """Nanoseconds per context token attended to."""
    reply_tokens: int = Field(default=64, ge=1)
    """Mean length of a reply; each prompt has its own, the same every time."""
    max_context_tokens: int = Field(default=8192, ge=16)
    """Longest prompt and reply together."""


class SglangMeshEngine(BaseModel):
    """The SGLang server that each of a tier's workers wraps: one of its own, or a running one."""

    model_config = _FROZEN

    endpoint: str = ""
    """Base URL of a running server. Empty: each worker starts one of its own and keeps it running."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """A server that loads its model is waited for so long."""
    gone_s: float = Field(default=10.0, gt=0)
    """A server that has not answered for so long counts as gone. A worker starts its own anew; with another's the worker
    ends, and is started anew."""
    python: str = ""
    """The Python that has sglang installed, for servers that workers start. Empty: the worker's own."""
    port: int = Field(default=0, ge=0, le=65535)
    """Where the first worker's server listens on loopback, the others count on from it; 0 takes any free port."""
    tp: int = Field(default=1, ge=1)
    """Tensor parallelism: GPUs that share every layer."""
    pp: int = Field(default=1, ge=1)
    """Pipeline parallelism: stages that share the layers."""
    dp: int = Field(default=1, ge=1)
    """Data parallelism: copies of the model behind one server."""
    gpus: tuple[int, ...] = ()
    """GPUs of the tier's workers in order, tp * pp * dp each (CUDA_VISIBLE_DEVICES). Empty: as the environment says."""
    mem_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Share of a GPU's memory for weights and KV cache. None: the KV cache has room for the tier's kv_tokens."""
    deterministic: bool = False
    """Sampled replies depend on their seed only, so they go on unchanged elsewhere. Needs a GPU attention backend."""
    kv_store: str = ""
    """A folder that servers of the same model share KV through: requests move between them without recomputing.
    A relative path counts from the mesh file. Empty: none."""
    flags: tuple[str, ...] = ()
    """More flags of its command line, as they are."""
    env: dict[str, str] = {}
    """More environment variables of its process."""


class MeshTier(BaseModel):
    """One tier of the cascade."""

    model_config = _FROZEN

    name: str
    """Its name: 1 to 63 of a-z, 0-9, -, _ and `.`."""
    model: str = ""
    """A folder in Hugging Face format (a relative path counts from the mesh file), or a model's id at the hub. A simulated
    tier needs none."""
    served_model_name: str = ""
    """The model's name as users know it. Empty: the folder's name, or the tier's where it has no model."""
    workers: int = Field(default=1, ge=0)
    """Worker processes."""
    threshold: float | None = Field(default=None, ge=0, le=100)
    """Answers stand from this score on. On every tier but the last."""
    engine: Literal["torch", "sglang", "simulated"] = "torch"
    """What runs the model: ours, on torch; an SGLang server; or a latency model."""
    device: str = "cpu"
    """Where torch runs it: cpu, cuda, cuda:1, ..."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and KV cache. auto: what the model's config says."""
    kv_tokens: int = Field(default=32_768, ge=64)
    """Room in the KV cache, in tokens."""
    kv_block_tokens: int = Field(default=16, ge=1)
    """Tokens in a KV block."""
    max_running: int = Field(default=32, ge=1)
    """Requests computed together."""
    max_queued: int = Field(default=64, ge=0)
    """Requests waiting in the worker; one more is refused."""
    max_step_tokens: int = Field(default=512, ge=1)
    """Tokens computed in one step: longer prompts are cut into chunks of what decoding leaves."""
    max_context_tokens: int | None = Field(default=None, ge=16)
    """Longest prompt and reply together. None: what the model was made for, as far as the KV cache allows."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each worker."""
    tool_format: Literal["auto", "hermes", "llama3_json"] = "auto"
    """How the model writes tool calls. auto: what its chat template says; a model whose template takes no tools has none."""
    simulated: SimulatedMeshEngine = SimulatedMeshEngine()
    """The latency model of the simulated engine."""
    sglang: SglangMeshEngine = SglangMeshEngine()
    """The server of the sglang engine."""

    @property
    def served_name(self) -> str:
        """The model's name as users know it."""
        return self.served_model_name or Path(self.model).name or self.name


class MeshScorer(BaseModel):
    """One scorer of the judge."""

    model_config = _FROZEN

    name: str
    """Its name in plans and requests."""
    kind: Literal["judge-model", "llm", "confidence", "exact"]
    """judge-model: a model that reads (prompt, answer) in one pass; llm: a language model asked for a grade;
    confidence: the token logprobs of the answer; exact: comparison with an expected answer."""
    model: str = ""
    """judge-model: a folder in Hugging Face format, or an id at the hub. llm: the model's name at the endpoint."""
    endpoint: str = ""
    """llm: base URL of an OpenAI-compatible API, up to and with `/v1`."""
    tier: str = ""
    """llm: the tier of this mesh whose model gives the grades, in place of endpoint and model."""
    api_key_env: str = ""
    """llm at an endpoint: name of the environment variable that holds the key. Empty: no key."""
    calibration: str = ""
    """File of a calibration. Empty: judge-model takes calibration.json beside its model, the others none."""
    compare: Literal["text", "number", "final-answer"] = "final-answer"
    """exact: how an answer is compared with the expected one."""
    timeout_s: float = Field(default=8.0, gt=0)
    """llm: for one grade; at most the router's judge_timeout_s."""
    concurrency: int = Field(default=8, ge=1)
    """llm: grades asked for at once."""
    tier_share: float = Field(default=0.25, gt=0, le=1)
    """llm of a tier: share of the tier's max_running that grades take at once, over all judges; at least one place of each
    worker for each judge."""


class MeshJudge(BaseModel):
    """The judge."""

    model_config = _FROZEN

    replicas: int = Field(default=1, ge=0)
    """Judge processes."""
    scorers: tuple[MeshScorer, ...] = (MeshScorer(name="confidence", kind="confidence"),)
    """What can score. Left out: the confidence of the answer's tokens, which needs no model."""
    default_scorer: str = ""
    """The scorer of requests that name none. Empty: the first."""
    max_batch: int = Field(default=32, ge=1)
    """Answers scored in one forward pass."""
    max_batch_tokens: int = Field(default=4096, ge=64)
    """Tokens in one forward pass, padding counted."""
    max_queued: int = Field(default=512, ge=1)
    """Answers of one scorer that are judged or wait, at most; one more is refused, as is one that could not be judged before
    its caller gives up."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each judge."""
    device: str = "cpu"
    """Where torch runs the judge model."""


class MeshRouter(BaseModel):
    """The routers."""

    model_config = _FROZEN

    replicas: int = Field(default=1, ge=1)
    """Router processes."""
    grpc_port: int = Field(default=50051, ge=0, le=65535)
    """The first router's gRPC port, the others count on from it; 0 takes any free port."""
    http_port: int = Field(default=8000, ge=0, le=65535)
    """Likewise for the OpenAI-compatible API."""
    max_active: int = Field(default=256, ge=1)
    """Requests worked on at once by one router."""
    max_waiting: int = Field(default=512, ge=0)
    """Requests waiting for that; one more gets RESOURCE_EXHAUSTED."""
    default_deadline_s: float = Field(default=600.0, gt=0)
    """For requests that bring no deadline."""
    write_timeout_s: float = Field(default=30.0, gt=0)
    """A request whose client does not read for so long is cancelled; so is a router's call to a worker."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """An HTTP request's body must have come within this time; else 408."""
    keepalive_timeout_s: float = Field(default=75.0, gt=0)
    """An HTTP connection on which no complete request head has come for so long is closed: idle ones, and slow headers."""
    connection_idle_s: float = Field(default=600.0, gt=0)
    """A gRPC connection without a call is closed after so long; clients connect again by themselves."""
    max_connections: int = Field(default=4096, ge=1)
    """Connections to one router, for gRPC and HTTP each; more are closed at once."""
    judge_timeout_s: float = Field(default=10.0, gt=0)
    """For one judgement, tries included."""
    judge_concurrency: int = Field(default=64, ge=1)
    """Judgements that one router asks for at once; the others wait, for half of judge_timeout_s at most."""
    judge_open_s: float = Field(default=1.0, gt=0)
    """A judge that timed out three times in a row is not asked for so long (circuit breaker); then one judgement tries it."""
    worker_silence_s: float = Field(default=15.0, gt=0)
    """A worker that says nothing for so long on a stream counts as dead for that request."""
    heartbeat_s: float = Field(default=5.0, ge=0.05)
    """A gRPC stream that has had nothing to send for so long gets a heartbeat, so that clients can tell a slow answer from a
    router that is stuck."""
    tier_wait_s: float = Field(default=30.0, ge=0)
    """A request waits so long for an instance of a tier that has none; tiers below the last are skipped instead."""
    ejection_s: float = Field(default=2.0, ge=0)
    """An instance that failed is tried last for so long."""
    max_attempts: int = Field(default=8, ge=1)
    """Instances tried for one tier of one request, failovers counted."""
    max_deaths: int = Field(default=2, ge=1)
    """A request that so many workers died of is tried at no other (POISON_REQUEST): it may be the cause. The death of a
    worker that had carried the reply on for 16 tokens is not counted."""
    max_refusals: int = Field(default=50, ge=1)
    """Times that workers of one tier may refuse one request, for want of room or because they drain, before it is given up;
    where they are full its client is told when to come again. A worker that refused is left alone for up to a second."""


class MeshReplan(BaseModel):
    """Watching the workload for drift, and planning again. The files are those of `penstock plan`; paths count from here."""

    model_config = _FROZEN

    enabled: bool = False
    """Routers sample finished requests (lengths and scores, no text), and the planner follows them. Needs the files below."""
    cluster: str = ""
    """Cluster file: what the plan may use."""
    models: str = ""
    """Models file; its tiers are this file's."""
    trace: str = ""
    """Trace: the pattern of arrivals; its rate becomes the one measured."""
    quality: str = ""
    """Judged prompts: stand in for what sampled requests do not tell, as the scores of tiers they did not visit."""
    min_quality: float | None = Field(default=None, ge=0, le=100)
    """Plan for the least latency at this mean score; either this or max_latency_s."""
    max_latency_s: float | None = Field(default=None, gt=0)
    """Plan for the most quality within this p95 of the slowest tier."""
    gpus: int | None = Field(default=None, ge=1)
    """At most so many of the cluster's. None: all."""
    requests: int = Field(default=500, ge=20)
    """Requests to plan for; all of the trace's where it has fewer. A p95 needs 20."""
    window_s: float = Field(default=300.0, gt=0)
    """Requests are sampled and compared by windows of so long."""
    sample: int = Field(default=50, ge=1)
    """Requests that each router samples in a window."""
    rate_change: float = Field(default=0.3, gt=0)
    """A rate that differs by this share counts as drift, where noise does not explain it."""
    length_change: float = Field(default=0.3, gt=0)
    """Likewise for tokens."""
    score_change: float = Field(default=6.0, gt=0)
    """Likewise for mean scores, in points."""
    confirm_windows: int = Field(default=2, ge=1)
    """Windows that must show a change before it counts."""
    cooldown_windows: int = Field(default=2, ge=0)
    """After planning again, nothing counts as drift for so many windows."""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if self.enabled:
            missing = [name for name in ("cluster", "models", "trace", "quality") if not getattr(self, name)]
            problems = [FieldProblem(f"planner.replan.{name}", "missing: needed to plan again") for name in missing]
            if (self.min_quality is None) == (self.max_latency_s is None):
                problems.append(FieldProblem("planner.replan", "give either min_quality or max_latency_s"))
            if problems:
                raise _FieldsDisagree(*problems)
        return self


class MeshPlanner(BaseModel):
    """The planner."""

    model_config = _FROZEN

    replicas: int = Field(default=1, ge=0)
    """Planner processes."""
    judge_unavailable: Literal["escalate", "accept"] = "escalate"
    """What routers do with answers that cannot be judged: the largest tier answers, or the answer stands."""
    max_instances: int = Field(default=64, ge=1)
    """Instances that a plan may give a tier; more are refused, unless this file itself gives the tier as many."""
    replan: MeshReplan = MeshReplan()
    """Planning again when the workload drifts: see below."""


class MeshStages(BaseModel):
    """Length stages, where the plan has any: how a worker watches its place, and how much may move at once."""

    model_config = _FROZEN

    look_s: float = Field(default=0.5, gt=0)
    """A worker compares itself with its stage, and looks for its place, this often."""
    refine_s: float = Field(default=5.0, gt=0)
    """Between two refinements of a worker's boundary."""
    max_transfers: int = Field(default=3, ge=2)
    """Requests that move in and out of one worker at once."""
    bid_timeout_s: float = Field(default=0.5, gt=0)
    """A router waits so long for bids; who has not answered by then is left out."""
    turn_timeout_s: float = Field(default=10.0, gt=0)
    """A request that has been won and not sent for so long stays where it is."""


MAX_PORT = 65_535


def redis_url_problem(url: str) -> str:
    """What is wrong with the URL of a Redis; empty where it can be one, or is left out."""
    if not url:
        return ""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        return "must be redis://HOST:PORT/NUMBER, rediss:// or unix://"
    try:
        port = parts.port
    except ValueError:
        return "the port must be a number up to 65535"
    return "names no host" if parts.scheme != "unix" and not parts.hostname and port is None else ""


class MeshFile(BaseModel):
    """A mesh file: what runs, and how. Drives `penstock up` and compose alike."""

    model_config = _FROZEN

    name: str = Field(default="penstock", min_length=1, max_length=128)
    """The mesh's name; a prefix of its keys in Redis, so that several meshes can share one."""
    redis_url: str = ""
    """A Redis to use. Empty: REDIS_URL from the environment, or else `penstock up` starts one."""
    tiers: tuple[MeshTier, ...]
    """From the cheapest up."""
    judge: MeshJudge = MeshJudge()
    """The judge: see below. Left out: the answers' confidence is judged, and a mesh of one tier, whose answers always
    stand, has no judge process."""
    router: MeshRouter = MeshRouter()
    """The routers: see below."""
    planner: MeshPlanner = MeshPlanner()
    """The planner: see below."""
    stages: MeshStages = MeshStages()
    """Length stages: see below."""

    @model_validator(mode="before")
    @classmethod
    def _one_tier_needs_no_judge(cls, data: Any) -> Any:
        if isinstance(data, dict) and "judge" not in data and isinstance(tiers := data.get("tiers"), list | tuple):
            return data | ({"judge": {"replicas": 0}} if len(tiers) == 1 else {})
        return data

    @model_validator(mode="after")
    def _fields_agree(self, info: ValidationInfo) -> Self:
        if info.context != FIELDS_ALONE and (problems := [*self.disagreements()]):
            raise _FieldsDisagree(*problems)
        return self

    def disagreements(self) -> Iterator[FieldProblem]:
        """What is wrong between fields that are sound by themselves."""
        try:
            self.plan("check").validate()
        except InvalidRequest as error:
            yield from (FieldProblem(p.field.removeprefix("plan."), p.problem) for p in error.problems)
        for i, tier in enumerate(self.tiers):
            if not tier.model and tier.engine != "simulated":
                yield FieldProblem(f"tiers[{i}].model", f"missing: the {tier.engine} engine needs a model")
            one, gpus = tier.sglang.tp * tier.sglang.pp * tier.sglang.dp, len(tier.sglang.gpus)
            if gpus and gpus < one * tier.workers:
                yield FieldProblem(f"tiers[{i}].sglang.gpus", f"{gpus} for {tier.workers} workers of {one}")
        grpc, http = self.router.grpc_port, self.router.http_port
        for field, port in (("grpc_port", grpc), ("http_port", http)):
            if port + self.router.replicas - 1 > MAX_PORT:
                yield FieldProblem(
                    f"router.{field}", f"{port} leaves no ports for {self.router.replicas} routers below {MAX_PORT + 1}"
                )
        if problem := redis_url_problem(self.redis_url):
            yield FieldProblem("redis_url", problem)
        if grpc and http and abs(grpc - http) < self.router.replicas:
            yield FieldProblem(
                "router.http_port", f"{http} and grpc_port {grpc} overlap: each router takes the next of both"
            )
        for i, scorer in enumerate(self.judge.scorers):
            if scorer.kind == "judge-model" and not scorer.model:
                yield FieldProblem(f"judge.scorers[{i}].model", "missing: a judge-model scorer needs a model")
            if scorer.kind == "llm" and bool(scorer.tier) == bool(scorer.endpoint and scorer.model):
                yield FieldProblem(f"judge.scorers[{i}]", "an llm scorer needs either tier, or endpoint and model")
            if scorer.kind == "llm" and scorer.timeout_s > self.router.judge_timeout_s:
                yield FieldProblem(
                    f"judge.scorers[{i}].timeout_s",
                    f"{scorer.timeout_s:g} s, but router.judge_timeout_s is {self.router.judge_timeout_s:g} s: "
                    "routers would give up before the scorer can answer",
                )
            if scorer.tier and scorer.tier not in {tier.name for tier in self.tiers}:
                yield FieldProblem(f"judge.scorers[{i}].tier", f"no tier '{scorer.tier}'")
        names = [scorer.name for scorer in self.judge.scorers]
        if not names:
            yield FieldProblem("judge.scorers", "at least one is needed")
        if len(set(names)) != len(names):
            yield FieldProblem("judge.scorers", "names must differ")
        if self.judge.default_scorer and self.judge.default_scorer not in names:
            yield FieldProblem("judge.default_scorer", f"no scorer '{self.judge.default_scorer}' among {names}")

    def plan(self, input_digest: str) -> Plan:
        """The plan that this file asks for."""
        tiers = tuple(TierPlan(t.name, t.served_name, t.threshold, t.workers) for t in self.tiers)
        return Plan(
            revision=0,
            tiers=tiers,
            judge_unavailable=JudgeUnavailable(self.planner.judge_unavailable),
            provenance=Provenance("mesh-file", input_digest=input_digest),
        )

    def tier(self, name: str) -> MeshTier:
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise SettingsError(
            f"tier: no tier '{name}' in the mesh file, which has {', '.join(t.name for t in self.tiers)}"
        )


def load_mesh_file(path: Path) -> MeshFile:
    """Read a mesh file.

    Raises:
        SettingsError: names the file and every field at fault.
    """
    data = read_mesh_data(path)
    try:
        return MeshFile.model_validate(data)
    except ValidationError as error:
        problems = field_problems(error)
        raise SettingsError(f"{path}: {joined(problems)}", problems) from None


class _OneValuePerKey(yaml.SafeLoader):
    """Refuses a key that stands twice: the second would silently take the place of the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name is not None and name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"'{name}' stands twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def read_mesh_data(path: Path) -> dict[str, Any]:
    """What a mesh file holds, unchecked.

    Raises:
        SettingsError: no file, no YAML, or no mapping.
    """
    try:
        data = yaml.load(path.read_text(), _OneValuePerKey)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8 text: {error}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: not YAML: {error}") from None
    except RecursionError:
        raise SettingsError(f"{path}: nested too deep") from None
    if not isinstance(data, dict):
        raise SettingsError(f"{path}: must hold a mapping with at least `tiers`")
    return data


def digest(path: Path) -> str:
    """A short digest of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class ServiceSettings(BaseSettings):
    """What every service reads from the environment, each name with the prefix PENSTOCK_."""

    model_config = SettingsConfigDict(
        env_prefix="PENSTOCK_", frozen=True, extra="ignore", use_attribute_docstrings=True, env_ignore_empty=True
    )

    mesh_file: Path = Path("mesh.yaml")
    """The mesh file."""
    tier: str = ""
    """The tier that a worker serves; workers need it."""
    worker_index: int = Field(default=0, ge=0)
    """A worker's number in its tier: which of the tier's GPUs and ports its SGLang server takes."""
    instance_id: str = ""
    """This process's name in the mesh. Empty: made from role, tier, host and process."""
    sglang_endpoint: str = ""
    """The SGLang server that this worker wraps, where a tier has several. Empty: the mesh file's."""
    bind_host: str = "127.0.0.1"
    """The address that servers listen on."""
    advertise_host: str = ""
    """The address that others reach this process at. Empty: bind_host, or the host's name where that is 0.0.0.0."""
    grpc_port: int = Field(default=0, ge=0, le=65535)
    """0 takes any free port."""
    http_port: int = Field(default=0, ge=0, le=65535)
    """The router's OpenAI-compatible API; 0 takes any free port."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Prometheus metrics; 0 takes any free port."""
    redis_url: str = ""
    """The state store. Empty: REDIS_URL, then the mesh file's."""
    lease_s: float = Field(default=3.0, gt=0)
    """The lease of an instance: not heard of for so long, it gets new requests only where no other can take them, and is
    forgotten unless it answers for itself."""
    publish_interval_s: float = Field(default=0.25, gt=0)
    """Load is published at most so often when it changes, and every third of a lease when not."""
    drain_s: float = Field(default=30.0, ge=0)
    """At shutdown, running requests get so long to end."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe message that is logged."""
    log_format: Literal["text", "json"] = "text"
    """text for people, json for collectors; both carry trace ids."""
    frame_interval_ms: float = Field(default=20.0, ge=0)
    """A worker gathers tokens into one frame for at most so long; the first token goes at once."""
    frame_tokens: int = Field(default=32, ge=1)
    """Tokens in one frame at most."""
    trace_keep: int = Field(default=500, ge=0)
    """Traces kept in Redis for `penstock trace`; 0 keeps none."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings

    @classmethod
    def load(cls, **values: Any) -> Self:
        """Settings from the environment, `values` over it; SettingsError names every field at fault."""
        try:
            return cls(**values)
        except ValidationError as error:
            problems = [FieldProblem(f"PENSTOCK_{p.field.upper()}", p.problem) for p in field_problems(error)]
            raise SettingsError(joined(problems), problems) from None

    def state_url(self, mesh: MeshFile) -> str:
        """Where Redis is; SettingsError if nobody says."""
        url = self.redis_url or os.environ.get("REDIS_URL", "") or mesh.redis_url
        if not url:
            raise SettingsError("redis_url: neither PENSTOCK_REDIS_URL, REDIS_URL nor the mesh file names a Redis")
        return url

    def resolve(self, path: str) -> Path:
        """A path of the mesh file: relative ones count from its folder."""
        return Path(path) if Path(path).is_absolute() else self.mesh_file.resolve().parent / path


def environment_value(name: str) -> str | None:
    """A variable that a setting names (an API key): None if it is not set."""
    return os.environ.get(name)


def field_problems(error: ValidationError) -> list[FieldProblem]:
    """Every fault with the path of its field, as `tiers[0].workers`; a key that does not exist with the nearest that does."""
    found: list[FieldProblem] = []
    for fault in error.errors():
        cause = fault.get("ctx", {}).get("error")
        if isinstance(cause, _FieldsDisagree):
            found += cause.problems
            continue
        problem = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(fault["loc"][-1]), _field_names(fault["loc"][:-1]), n=1)
            problem = "no such field" + (f": did you mean '{near[0]}'?" if near else "")
        found.append(FieldProblem(field_path(fault["loc"]), problem))
    return found


def field_path(location: Sequence[str | int]) -> str:
    """A place in a mesh file as people write it: `tiers[0].workers`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def joined(problems: Sequence[FieldProblem]) -> str:
    """Problems in one line."""
    return "; ".join(f"{p.field}: {p.problem}" if p.field else p.problem for p in problems)


def _field_names(location: Sequence[str | int]) -> list[str]:
    """The fields of the part of a mesh file at `location`."""
    model: type[BaseModel] = MeshFile
    for name in (part for part in location if isinstance(part, str)):
        annotation = model.model_fields[name].annotation
        model = next(kind for kind in (annotation, *get_args(annotation)) if _is_model(kind))
    return list(model.model_fields)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
