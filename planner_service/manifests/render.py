"""A plan as a mesh file, as groups of replicas, and as a compose file. No I/O.

A replica is an SGLang server with a Penstock worker before it, or, in a tier whose plan has drafts, a worker that runs the
model itself: only Penstock's own engine drafts as it was planned. The servers' flags are those of the tier's engine.

A replica of up to a node's GPUs is one server; a longer pipeline is one server over several nodes (SGLang's --nnodes). Every
group of equal replicas is by itself, so a tier may have groups of unlike shapes. Models are expected under /models, by their
names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import penstock
from penstock.planner_service.manifests.mesh_tiers import mesh_tiers
from penstock.planner_service.question.site import ONE_GPU, Site
from penstock.planner_service.routing.grading import REPLY_TOKENS
from penstock.services.acceptance.pipeline import OF_TIERS
from penstock.services.acceptance.rule import AcceptanceRule
from penstock.services.chart import SERVER_PORT, dns_name
from penstock.services.domain.errors import invalid
from penstock.services.domain.hardware import ClusterSpec, ReplicaShape
from penstock.services.domain.server_nodes import node_counts
from penstock.services.extensions.engines import engine_of, tier_in_shape
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.mesh_schema.tiers import MeshTier
from penstock.services.settings import ServiceSettings
from penstock.types.planned import CascadePlan, PlannedTier

PRIVATE_NETWORK = {"PENSTOCK_OPEN_ACCESS": "true", "PENSTOCK_ADMIN_HOST": "0.0.0.0"}
"""The compose file has neither keys nor certificates: only the network protects the services."""
SGLANG_IMAGE, REDIS_IMAGE = "lmsysorg/sglang:v0.5.23", "redis:7.4-alpine"
# The images that docker-compose.yml builds, by role.
_IMAGES = {"router": "router", "planner": "planner", "judge": "worker", "worker": "worker"}
PENSTOCK_IMAGES = {role: f"penstock-mesh-{image}:{penstock.__version__}" for role, image in _IMAGES.items()}
SCORE_PREDICTOR = "/models/score_predictor.json"
GRPC_PORT, HTTP_PORT = 50051, 8000  # of our own image
MESH_FILE = "/etc/penstock/mesh.yaml"
GRADING_SHARE = 0.25  # of the places of a tier that grades
START_S = 1800  # a large model is loaded for so long
MIXED_CHUNKS = "--enable-mixed-chunk"  # as steps are simulated

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Group:
    """`count` equal replicas of one tier. nodes: that one replica spans; gpus: of each of these. drafts: its workers run the
    model themselves, and verify drafts."""

    tier: int
    name: str
    shape: ReplicaShape
    count: int
    nodes: int
    gpus: int
    drafts: bool


def groups(site: Site, shapes: Sequence[Sequence[tuple[ReplicaShape, int]]]) -> list[Group]:
    """The groups of the tiers, but of remote ones. InvalidRequest for a replica whose shards do not fit a node."""
    result = []
    for tier, parts in enumerate(shapes):
        drafts = site.has_drafts(tier)
        for j, (shape, count) in enumerate(parts if site.remote_of(tier) is None else ()):
            if drafts and shape.gpus > 1:
                raise invalid(f"tiers[{tier}].replicas[{j}]", f"{site.tiers[tier]} has drafts: {ONE_GPU}, not {shape}")
            room = _type_of(site, shape, f"tiers[{tier}].replicas[{j}]").gpus_per_node
            if shape.tp > room:
                raise invalid(f"tiers[{tier}].replicas[{j}]", f"{shape} does not fit nodes of {room} GPUs")
            nodes = next(n for n in node_counts(shape) if shape.gpus // n <= room)
            name = dns_name(f"{site.tiers[tier]}-{shape.name}")
            result.append(Group(tier, name, shape, count, nodes, shape.gpus // nodes, drafts))
    return result


def _type_of(site: Site, shape: ReplicaShape, field: str) -> ClusterSpec:
    """The GPUs that a shape runs on. InvalidRequest where the cluster has none of that type."""
    cluster = site.type_of(shape)
    if cluster is None:
        raise invalid(field, f"the cluster has no GPUs of type '{shape.gpu}': {site.type_names}")
    return cluster


def mesh_file(site: Site, tiers: Sequence[Manifest]) -> Manifest:
    """A mesh file for a plan. Where the models file does not state what judges, the largest tier grades.

    tiers: of `planned_tiers`.

    Raises:
        InvalidRequest: The plan has no replicas of the tier that grades, or a tier is remote.
    """
    entries = []
    for i, (name, planned) in enumerate(zip(site.tiers, tiers, strict=True)):
        if site.remote_of(i) is not None:
            raise invalid("render", f"{name} is remote: use a mesh file in which it has engine: openai")
        limits = {"max_running": site.limits.max_running}
        entries.append(
            {"name": name, "model": _model_folder(site.models[i].name), **planned, **limits, **_engine(site, i)}
        )
    judge = _judge(site, [planned["workers"] for planned in tiers])
    return {"name": "penstock", "tiers": entries, "judge": judge}


def planned_tiers(plan: CascadePlan) -> list[Manifest]:
    """What a plan says of each tier in a mesh file, but for rules that were fitted to a judge."""
    entries, counts = list[Manifest](), [tier.instances for tier in plan.tiers]
    served = mesh_tiers([tier.threshold for tier in plan.tiers[:-1]], counts)
    for tier, (threshold, count) in zip(plan.tiers, served, strict=True):
        limit = {} if threshold is None else {"threshold": threshold}
        entries.append({"workers": count, **limit, **rules_in_mesh(OF_TIERS, tier)})
    return entries


def rules_in_mesh(rules: Sequence[AcceptanceRule], value: PlannedTier | CascadePlan) -> Manifest:
    """The rules of a tier or of a plan in a mesh file."""
    forms = {rule.field: rule.in_mesh_file(rule.value(value)) for rule in rules}
    return {name: form for name, form in forms.items() if form is not None}


def _judge(site: Site, counts: Sequence[int]) -> Manifest:
    """The judge in the mesh file. counts: replicas by tier.

    A tier that grades is sent grading requests through its workers, the least loaded first, so all its servers share them.
    """
    if site.grading is not None and not site.grading.by_tier:
        limits = site.grading.replicas[0].limits
        scorer: Manifest = {"name": "judge-model", "kind": "judge-model", "model": _model_folder(site.grading.model)}
        processes = {"replicas": len(site.grading.replicas)}
        batch = {"max_batch": limits.max_running, "max_batch_tokens": limits.max_step_tokens}
        return {"scorers": [scorer], "default_scorer": scorer["name"]} | processes | batch
    tier = next(t for t in reversed(range(len(counts))) if counts[t]) if site.grading is None else site.grading.tier
    if not counts[tier]:
        raise invalid("judge.tier", f"the plan has no replicas of {site.tiers[tier]}, which is to grade")
    scorer = {"name": "llm", "kind": "llm", "tier": site.tiers[tier]}
    scorer["tier_share"] = GRADING_SHARE
    scorer["concurrency"] = counts[tier] * max(1, round(site.limits.max_running * GRADING_SHARE))  # as the workers take
    if site.grading is not None:
        scorer["thinking_tokens"] = max(0, site.grading.reply_tokens - REPLY_TOKENS)
    return {"scorers": [scorer], "default_scorer": "llm"}


def _engine(site: Site, tier: int) -> Manifest:
    """The engine of a tier in the mesh file, with the limits that the plan was simulated with."""
    speculation, limits = site.speculation_of(tier), site.limits
    common = {"device": "cuda", "max_step_tokens": limits.max_step_tokens, "kv_block_tokens": limits.block_tokens}
    if not site.has_drafts(tier):
        return {"engine": "sglang", **common, "sglang": {"start_timeout_s": START_S, "flags": [MIXED_CHUNKS]}}
    drafters = [_model_folder(spec.name) for spec, _ in speculation.drafters]
    drafting = {"speculation": {"drafters": drafters, "max_window": speculation.max_window}} if drafters else {}
    return {"engine": "torch", **common, **drafting}


def _model_folder(model: str) -> str:
    return f"/models/{model}"


def tier_of(mesh: Manifest, site: Site, group: Group) -> MeshTier:
    """The tier of the mesh file, as the replicas of a group are: CASCADIA's strategy, and the memory it was simulated with.

    Raises:
        InvalidRequest: Its engine runs a replica on one GPU.
    """
    tier: Manifest = mesh["tiers"][group.tier]
    shape, whole = group.shape, MeshFile.model_validate(mesh)
    if tier.get("engine") != "sglang":
        if shape.gpus > 1:
            raise invalid(f"tiers[{group.tier}].engine", f"must be sglang: the plan has replicas of {shape.gpus} GPUs")
        return whole.tiers[group.tier]
    cluster, runtime = _type_of(site, shape, group.name), site.runtime
    share = runtime.memory_share - runtime.activation_bytes / cluster.gpu.memory_bytes  # weights and KV
    shaped = tier_in_shape(whole, whole.tiers[group.tier], shape)
    return shaped.with_options(mem_fraction=round(share, 3))


def compose(
    site: Site, shapes: Sequence[Sequence[tuple[ReplicaShape, int]]], mesh: Manifest, mesh_path: str
) -> Manifest:
    """A compose file for one machine. mesh: the mesh file, which is at `mesh_path`.

    Raises:
        InvalidRequest: The plan needs more GPUs than a node has.
    """
    needed = sum(shape.gpus * count for parts in shapes for shape, count in parts)
    used = {_type_of(site, shape, "tiers"): None for parts in shapes for shape, count in parts if count}
    if len(used) > 1:
        names = " and ".join(each.name for each in used)
        raise invalid("render", f"compose is for one machine: the plan needs GPUs of {names}; the Helm chart can do it")
    room = next(iter(used), site.cluster).gpus_per_node
    if needed > room:
        problem = f"compose is for one machine: the plan needs {needed} GPUs, a node has {room}"
        raise invalid("render", f"{problem}; the Helm chart can do it")
    penstock: Manifest = {
        "restart": "unless-stopped",
        "stop_grace_period": "35s",
        "depends_on": {"redis": {"condition": "service_healthy"}},
        "environment": {"REDIS_URL": "redis://redis:6379/0", **PRIVATE_NETWORK},
        "volumes": [f"{mesh_path}:{MESH_FILE}:ro", "${MODELS:-./models}:/models:ro"],
    }

    gpu, whole, settings = 0, MeshFile.model_validate(mesh), ServiceSettings.load()

    def of(role: str) -> Manifest:
        return {"image": PENSTOCK_IMAGES[role], "command": [f"penstock.{role}_service"]} | penstock

    services: Manifest = {
        "redis": {
            "image": REDIS_IMAGE,
            "restart": "unless-stopped",
            "healthcheck": {"test": ["CMD", "redis-cli", "ping"], "interval": "2s", "timeout": "2s", "retries": 15},
        },
        "planner": of("planner"),
        "judge": of("judge") | ({"deploy": {"replicas": judges}} if (judges := whole.judge.replicas) > 1 else {}),
        "router": of("router") | {"ports": [f"127.0.0.1:{port}:{port}" for port in (GRPC_PORT, HTTP_PORT)]},
    }
    for group in groups(site, shapes):
        tier = tier_of(mesh, site, group)
        server = engine_of(whole, tier).server(tier, settings, "0.0.0.0", SERVER_PORT)
        for i in range(group.count):
            ids = [str(gpu + k) for k in range(group.gpus)]
            gpu += group.gpus
            device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
            deploy = {"resources": {"reservations": {"devices": [device]}}}
            environment = penstock["environment"] | {"PENSTOCK_TIER": tier.name}
            worker = of("worker") | {"environment": environment}
            services[f"worker-{group.name}-{i}"] = worker
            if server is None:
                worker["deploy"] = deploy
                continue
            name = f"sglang-{group.name}-{i}"
            environment["PENSTOCK_SGLANG_ENDPOINT"] = f"http://{name}:{SERVER_PORT}"
            worker["depends_on"] = penstock["depends_on"] | {name: {"condition": "service_healthy"}}
            services[name] = {
                "image": SGLANG_IMAGE,
                "restart": "unless-stopped",
                "ipc": "host",
                "command": server.command,
                "environment": dict(server.environment),
                "volumes": ["${MODELS:-./models}:/models:ro"],
                "deploy": deploy,
                "healthcheck": {
                    "test": ["CMD", "curl", "-sf", f"http://127.0.0.1:{SERVER_PORT}/health"],
                    "interval": "10s",
                    "timeout": "5s",
                    "start_period": f"{START_S}s",
                    "retries": 3,
                },
            }
    return {"services": services}
