"""Manifests for a plan: a server and a worker for each replica, and the services around them. No I/O.

A replica is an SGLang server with a Penstock worker before it, or, in a tier whose plan has drafters, a worker that runs the
model itself: only Penstock's own engine drafts as it was planned.

A replica of up to a node's GPUs is one server; a longer pipeline is one server over several nodes (SGLang's --nnodes). Every
group of equal replicas stands by itself, so a tier may have groups of unlike shapes. The mesh file that belongs to the
manifests is rendered too; models are expected under /models, by their names.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner_service.mesh_tiers import mesh_tiers
from planner_service.routing.grading import REPLY_TOKENS
from planner_service.site import ONE_GPU, Site
from services.domain.errors import invalid
from services.domain.hardware import ClusterSpec, ReplicaShape
from services.domain.long_answers import LongAnswers
from services.mesh_schema import MeshScorer

PRIVATE_NETWORK = {"PENSTOCK_OPEN_ACCESS": "true", "PENSTOCK_ADMIN_HOST": "0.0.0.0"}
"""The manifests have neither keys nor certificates: only the network protects the services."""
SGLANG_IMAGE, REDIS_IMAGE = "lmsysorg/sglang:v0.5.23", "redis:7.4-alpine"
# The images that docker-compose.yml builds.
PENSTOCK_IMAGES = {
    "router": "penstock-mesh-router:latest",
    "planner": "penstock-mesh-planner:latest",
    "judge": "penstock-mesh-worker:latest",
    "worker": "penstock-mesh-worker:latest",
}
PORT, RENDEZVOUS_PORT = 30000, 20000
GRPC_PORT, HTTP_PORT = 50051, 8000  # of our own image
MESH_FILE = "/etc/penstock/mesh.yaml"
START_S = 1800  # a large model is loaded for so long
EXPERT_BACKEND = "deepep"  # without one, SGLang with --ep-size still gathers all tokens on all GPUs

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Group:
    """`count` equal replicas of one tier. nodes: that one replica spans; gpus: of each of these. drafts: its workers run the
    model themselves, with models that draft."""

    tier: int
    name: str
    model: str
    shape: ReplicaShape
    count: int
    nodes: int
    gpus: int
    drafts: bool


def groups(site: Site, shapes: Sequence[Sequence[tuple[ReplicaShape, int]]]) -> list[Group]:
    """InvalidRequest for a replica whose shards do not fit a node."""
    result = []
    for tier, parts in enumerate(shapes):
        if site.remote_of(tier) is not None:
            raise invalid(
                "render", f"{site.tiers[tier]} is remote: add its worker (engine: openai) to manifests of the rest"
            )
        drafts = bool(site.speculation_of(tier).drafters)
        for j, (shape, count) in enumerate(parts):
            if drafts and shape.gpus > 1:
                raise invalid(
                    f"tiers[{tier}].replicas[{j}]", f"{site.tiers[tier]} has drafters: {ONE_GPU}, not {shape}"
                )
            room = _type_of(site, shape, f"tiers[{tier}].replicas[{j}]").gpus_per_node
            if shape.tp > room:
                raise invalid(f"tiers[{tier}].replicas[{j}]", f"{shape} does not fit nodes of {room} GPUs")
            # as few nodes as hold equal numbers of stages
            nodes = next(n for n in range(1, shape.pp + 1) if shape.pp % n == 0 and shape.gpus // n <= room)
            name = f"{_dns(site.tiers[tier])}-tp{shape.tp}pp{shape.pp}"
            name += f"ep{shape.ep}" if shape.ep > 1 else ""
            name += f"attndp{shape.attn_dp}" if shape.attn_dp > 1 else ""
            name += f"-{_dns(shape.gpu)}" if shape.gpu else ""
            model = site.models[tier].name
            result.append(Group(tier, name, model, shape, count, nodes, shape.gpus // nodes, drafts))
    return result


def _type_of(site: Site, shape: ReplicaShape, field: str) -> ClusterSpec:
    """The GPUs that a shape runs on. InvalidRequest where the cluster has none of that type."""
    cluster = site.type_of(shape)
    if cluster is None:
        raise invalid(field, f"the cluster has no GPUs of type '{shape.gpu}': {site.type_names}")
    return cluster


def mesh_file(
    name: str,
    site: Site,
    shapes: Sequence[Sequence[tuple[ReplicaShape, int]]],
    thresholds: Sequence[float | None],
    long_answers: Sequence[LongAnswers | None] = (),
    *,
    best_answer: bool = False,
) -> Manifest:
    """The mesh file of the manifests. Where the models file does not state what judges, the largest tier grades.

    thresholds, long_answers: of the tiers but the last; long_answers may be empty. best_answer: of the whole plan.

    Raises:
        InvalidRequest: The plan has no replicas of the tier that grades.
    """
    counts = [sum(count for _, count in parts) for parts in shapes]
    tiers = []
    for i, (tier, (threshold, count)) in enumerate(zip(site.tiers, mesh_tiers(thresholds, counts), strict=True)):
        entry: Manifest = {
            "name": tier,
            "model": _model_folder(site.models[i].name),
            "workers": count,
            "max_running": site.limits.max_running,
            **_engine(site, i),
        }
        if threshold is not None:
            entry["threshold"] = threshold
        if i < len(long_answers) and (rule := long_answers[i]) is not None:
            entry["long_answers"] = asdict(rule)
        tiers.append(entry)
    planner = {"planner": {"best_answer": True}} if best_answer else {}
    return {"name": name, "tiers": tiers, "judge": _judge(site, counts), **planner}


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
    share = MeshScorer(name="llm", kind="llm").tier_share
    scorer["concurrency"] = counts[tier] * max(1, round(site.limits.max_running * share))  # as many as the workers take
    if site.grading is not None:
        scorer["thinking_tokens"] = max(0, site.grading.reply_tokens - REPLY_TOKENS)
    return {"scorers": [scorer], "default_scorer": "llm"}


def _judges(site: Site) -> int:
    """How many processes the judge service has."""
    return len(site.grading.replicas) if site.grading is not None and not site.grading.by_tier else 1


def _engine(site: Site, tier: int) -> Manifest:
    """The engine of a tier in the mesh file, with the limits that the plan was simulated with."""
    speculation = site.speculation_of(tier)
    if not speculation.drafters:
        endpoint = f"http://{_dns(site.tiers[tier])}-server:{PORT}"
        return {"engine": "sglang", "sglang": {"endpoint": endpoint, "start_timeout_s": START_S}}
    return {
        "engine": "torch",
        "device": "cuda",
        "max_step_tokens": site.limits.max_step_tokens,
        "kv_block_tokens": site.limits.block_tokens,
        "speculation": {
            "drafters": [_model_folder(spec.name) for spec, _ in speculation.drafters],
            "max_window": speculation.max_window,
        },
    }


def _model_folder(model: str) -> str:
    return f"/models/{model}"


def server_arguments(site: Site, group: Group) -> list[str]:
    """SGLang's launch flags for one replica; CASCADIA's strategy and the limits that the plan was simulated with."""
    cluster, runtime, limits = _type_of(site, group.shape, group.name), site.runtime, site.limits
    share = runtime.memory_share - runtime.activation_bytes / cluster.gpu.memory_bytes  # weights and KV
    flags = {
        "--model-path": _model_folder(group.model),
        "--served-model-name": "default",
        "--host": "0.0.0.0",
        "--port": str(PORT),
        "--tp-size": str(group.shape.tp),
        "--pp-size": str(group.shape.pp),
        "--mem-fraction-static": f"{share:.3f}",
        "--chunked-prefill-size": str(limits.max_step_tokens),
        "--max-running-requests": str(limits.max_running),
        "--page-size": str(limits.block_tokens),
    }
    if group.shape.ep > 1:
        flags |= {"--ep-size": str(group.shape.ep), "--moe-a2a-backend": EXPERT_BACKEND}
    if group.shape.attn_dp > 1:  # SGLang divides the limits between the groups
        flags["--attn-dp-size"] = str(group.shape.attn_dp)
    return [*(part for flag in flags.items() for part in flag), "--enable-mixed-chunk", "--enable-metrics"]


def compose(site: Site, shapes: Sequence[Sequence[tuple[ReplicaShape, int]]], mesh_path: str) -> Manifest:
    """A compose file for one machine. InvalidRequest for a plan that needs more GPUs than a node has."""
    needed = sum(shape.gpus * count for parts in shapes for shape, count in parts)
    used = {_type_of(site, shape, "tiers"): None for parts in shapes for shape, count in parts if count}
    if len(used) > 1:
        names = " and ".join(each.name for each in used)
        raise invalid("render", f"compose is for one machine: the plan needs GPUs of {names}; kubernetes can do it")
    room = next(iter(used), site.cluster).gpus_per_node
    if needed > room:
        problem = f"compose is for one machine: the plan needs {needed} GPUs, a node has {room}"
        raise invalid("render", f"{problem}; kubernetes can do it")
    penstock: Manifest = {
        "restart": "unless-stopped",
        "stop_grace_period": "35s",
        "depends_on": {"redis": {"condition": "service_healthy"}},
        "environment": {"REDIS_URL": "redis://redis:6379/0", **PRIVATE_NETWORK},
        "volumes": [f"{mesh_path}:{MESH_FILE}:ro", "${MODELS:-./models}:/models:ro"],
    }

    def of(role: str) -> Manifest:
        return {"image": PENSTOCK_IMAGES[role], "command": [f"{role}_service"]} | penstock

    services: Manifest = {
        "redis": {
            "image": REDIS_IMAGE,
            "restart": "unless-stopped",
            "healthcheck": {"test": ["CMD", "redis-cli", "ping"], "interval": "2s", "timeout": "2s", "retries": 15},
        },
        "planner": of("planner"),
        "judge": of("judge") | ({"deploy": {"replicas": judges}} if (judges := _judges(site)) > 1 else {}),
        "router": of("router") | {"ports": [f"127.0.0.1:{port}:{port}" for port in (GRPC_PORT, HTTP_PORT)]},
    }
    gpu, first_of_tier = 0, set[int]()
    for group in groups(site, shapes):
        for i in range(group.count):
            server, ids = f"sglang-{group.name}-{i}", [str(gpu + k) for k in range(group.gpus)]
            gpu += group.gpus
            aliases = [f"{_dns(site.tiers[group.tier])}-server"] if group.tier not in first_of_tier else []
            first_of_tier.add(group.tier)
            devices = [{"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}]
            deploy = {"resources": {"reservations": {"devices": devices}}}
            if group.drafts:
                environment = penstock["environment"] | _worker_environment(site, group)
                services[f"worker-{group.name}-{i}"] = of("worker") | {"environment": environment, "deploy": deploy}
                continue
            services[server] = {
                "image": SGLANG_IMAGE,
                "restart": "unless-stopped",
                "ipc": "host",
                "command": ["python3", "-m", "sglang.launch_server", *server_arguments(site, group)],
                "volumes": ["${MODELS:-./models}:/models:ro"],
                "networks": {"default": {"aliases": aliases}} if aliases else ["default"],
                "deploy": deploy,
                "healthcheck": {
                    "test": ["CMD", "curl", "-sf", f"http://127.0.0.1:{PORT}/health"],
                    "interval": "10s",
                    "timeout": "5s",
                    "start_period": f"{START_S}s",
                    "retries": 3,
                },
            }
            environment = penstock["environment"] | _worker_environment(site, group, f"http://{server}:{PORT}")
            waits = penstock["depends_on"] | {server: {"condition": "service_healthy"}}
            services[f"worker-{group.name}-{i}"] = of("worker") | {
                "environment": environment,
                "depends_on": waits,
            }
    return {"services": services}


def kubernetes(
    site: Site, shapes: Sequence[Sequence[tuple[ReplicaShape, int]]], mesh_yaml: str, namespace: str
) -> list[Manifest]:
    """Kubernetes objects, in the order to apply them.

    A replica within one node is a pod of server and worker, and a group a Deployment of these. One over several nodes is a
    StatefulSet whose pods are its nodes, each knowing its rank by its number, with a worker next to it.
    """
    name = {"name": namespace}
    manifests: list[Manifest] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": name},
        _object("v1", "ConfigMap", "mesh", namespace, data={"mesh.yaml": mesh_yaml}),
        _workload(
            "Deployment", "redis", namespace, 1, [{"name": "redis", "image": REDIS_IMAGE, "ports": _ports(6379)}]
        ),
        _service("redis", namespace, [6379]),
    ]
    for role, ports in (("planner", ()), ("judge", ()), ("router", (GRPC_PORT, HTTP_PORT))):
        container = _penstock(role, {}) | ({"ports": _ports(*ports)} if ports else {})
        processes = _judges(site) if role == "judge" else 1
        manifests.append(_workload("Deployment", role, namespace, processes, [container]))
        if ports:
            manifests.append(_service(role, namespace, list(ports)))
    first_of_tier = set[int]()
    for group in groups(site, shapes):
        tier = _dns(site.tiers[group.tier])
        if group.drafts:
            worker = _penstock("worker", _worker_environment(site, group)) | {"resources": _gpu_limits(group)}
            labels = {"penstock/tier": tier}
            manifests.append(
                _workload("Deployment", group.name, namespace, group.count, [worker], labels, _node_selector(group))
            )
            continue
        if group.nodes == 1:
            server = _server(group, server_arguments(site, group))
            selector = _node_selector(group)
            worker = _penstock("worker", _worker_environment(site, group, f"http://127.0.0.1:{PORT}"))
            manifests.append(
                _workload(
                    "Deployment",
                    group.name,
                    namespace,
                    group.count,
                    [server, worker],
                    {"penstock/tier": tier},
                    selector,
                )
            )
            if group.tier not in first_of_tier:
                manifests.append(_service(f"{tier}-server", namespace, [PORT], selector={"app": group.name}))
        else:
            for i in range(group.count):
                manifests += _over_nodes(site, group, f"{group.name}-{i}", namespace)
            if group.tier not in first_of_tier:
                first = {"statefulset.kubernetes.io/pod-name": f"{group.name}-0-0"}
                manifests.append(_service(f"{tier}-server", namespace, [PORT], selector=first))
        first_of_tier.add(group.tier)
    return manifests


def _over_nodes(site: Site, group: Group, name: str, namespace: str) -> Iterator[Manifest]:
    """One replica over several nodes: its pods start together and find each other at pod 0."""
    head = f"{name}-0.{name}"
    arguments = [*server_arguments(site, group), "--nnodes", str(group.nodes), "--dist-init-addr"]
    arguments += [f"{head}:{RENDEZVOUS_PORT}", "--node-rank", "$(NODE_RANK)"]
    rank = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    server = _server(group, arguments) | {"env": [{"name": "NODE_RANK", "valueFrom": rank}]}
    for probe in ("startupProbe", "readinessProbe"):
        server.pop(probe)  # only the first node answers; the worker waits for it
    labels = {"penstock/tier": _dns(site.tiers[group.tier])}
    workload = _workload("StatefulSet", name, namespace, group.nodes, [server], labels, _node_selector(group))
    workload["spec"] |= {"serviceName": name, "podManagementPolicy": "Parallel"}
    yield workload
    headless = _service(name, namespace, [PORT, RENDEZVOUS_PORT])
    headless["spec"] |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    yield headless
    worker = _penstock("worker", _worker_environment(site, group, f"http://{head}:{PORT}"))
    yield _workload("Deployment", f"{name}-worker", namespace, 1, [worker])


def _node_selector(group: Group) -> dict[str, str]:
    """In a cluster of several types of GPU: the label by which an operator marks the nodes of a type."""
    return {"penstock/gpu-type": group.shape.gpu} if group.shape.gpu else {}


def _server(group: Group, arguments: list[str]) -> Manifest:
    health = {"httpGet": {"path": "/health", "port": PORT}, "periodSeconds": 10}
    return {
        "name": "sglang",
        "image": SGLANG_IMAGE,
        "command": ["python3", "-m", "sglang.launch_server"],
        "args": arguments,
        "ports": _ports(PORT),
        "resources": _gpu_limits(group),
        "startupProbe": health | {"failureThreshold": START_S // 10},
        "readinessProbe": health,
        "volumeMounts": [
            {"name": "models", "mountPath": "/models", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _gpu_limits(group: Group) -> Manifest:
    return {"limits": {"nvidia.com/gpu": group.gpus}}


def _penstock(role: str, environment: dict[str, str]) -> Manifest:
    variables = {"REDIS_URL": "redis://redis:6379/0"} | PRIVATE_NETWORK | environment
    address = {"name": "PENSTOCK_ADVERTISE_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return {
        "name": role,
        "image": PENSTOCK_IMAGES[role],
        "args": [f"{role}_service"],
        "env": [*({"name": key, "value": value} for key, value in variables.items()), address],
        **_probes(role),
        "volumeMounts": [
            {"name": "mesh", "mountPath": MESH_FILE, "subPath": "mesh.yaml"},
            {"name": "models", "mountPath": "/models", "readOnly": True},
        ],
    }


def _probes(role: str) -> Manifest:
    """The router is sent requests while /readyz says so and restarted when /livez does not answer; the others speak gRPC."""
    if role == "router":
        ready, live = ({"httpGet": {"path": path, "port": HTTP_PORT}} for path in ("/readyz", "/livez"))
        return {"readinessProbe": ready | {"periodSeconds": 5}, "livenessProbe": live | {"periodSeconds": 10}}
    return {"readinessProbe": {"grpc": {"port": GRPC_PORT}, "periodSeconds": 5}}


def _worker_environment(site: Site, group: Group, endpoint: str = "") -> dict[str, str]:
    """endpoint: of the SGLang server; empty for a worker that runs the model itself."""
    server = {"PENSTOCK_SGLANG_ENDPOINT": endpoint} if endpoint else {}
    return {"PENSTOCK_TIER": site.tiers[group.tier], **server}


def _workload(
    kind: str,
    name: str,
    namespace: str,
    replicas: int,
    containers: list[Manifest],
    labels: dict[str, str] | None = None,
    node_selector: dict[str, str] | None = None,
) -> Manifest:
    selector = {"app": name}
    volumes = [
        {"name": "mesh", "configMap": {"name": "mesh"}},
        {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    pod: Manifest = {
        "metadata": {"labels": selector | (labels or {})},
        "spec": {"terminationGracePeriodSeconds": 60, "containers": containers, "volumes": volumes},
    }
    if node_selector:
        pod["spec"]["nodeSelector"] = node_selector
    spec = {"replicas": replicas, "selector": {"matchLabels": selector}, "template": pod}
    return _object("apps/v1", kind, name, namespace, spec=spec)


def _service(name: str, namespace: str, ports: list[int], selector: dict[str, str] | None = None) -> Manifest:
    spec = {
        "selector": selector or {"app": name},
        "ports": [{"name": f"port-{port}", "port": port, "targetPort": port} for port in ports],
    }
    return _object("v1", "Service", name, namespace, spec=spec)


def _object(version: str, kind: str, name: str, namespace: str, **content: Any) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": namespace}, **content}


def _ports(*ports: int) -> list[Manifest]:
    return [{"containerPort": port} for port in ports]


def _dns(tier: str) -> str:
    """A tier's name as part of a host name."""
    return tier.replace("_", "-").replace(".", "-")
