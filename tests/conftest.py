"""Shared by all tests: a real Redis, mesh files, the shipped models, tiny random ones."""

import functools
import gc
import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import HealthCheck, settings

from penstock.local import redis_server as local_redis
from penstock.services.processes import free_port
from tests.support import cpu_limit
from tests.support.services import RedisProcess, redis_server

if TYPE_CHECKING:
    from tests.support.mesh import TestMesh
    from tests.support.sglang import SglangServers

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # on busy cores, torch's threads wait for each other most of the time
os.environ.pop("REDIS_URL", None)
# Tests start many processes, and each worker of pytest-xdist loads every test: without bytecode files, each compiles it all.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
gc.disable()  # until everything is imported: collections would look at what stays anyway

# Properties are tried on the same examples in every run, however slow the machine is.
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

ROOT = Path(__file__).resolve().parent.parent
FAMILY = ROOT / "models" / "family"
TIERS = ("small", "medium", "large")

FIRST = (
    "local/test_demo.py",
    "local/test_local_mesh.py",
    "models/test_judge.py",
    "faults/test_kills.py",
    "planner/test_solver_rpcs.py",
    "test_wheel.py",
    "faults/test_sentinel_failover.py",
    "faults/test_mixed_versions.py",
    "faults/test_several_hosts.py",
    "faults/test_thousand_streams.py",
    "faults/test_slo_kills.py",
    "faults/test_stuck_router.py",
    "local/test_router_processes.py",
    "services/test_process_group.py",
    "local/test_up_and_down.py",
    "worker/test_torch_speculation.py",
    "planner/test_plan_cascade.py",
    "planner/test_cascade_choice.py",
    "cli/test_plan_command.py",
    "planner/test_planning_goals.py",
    "faults/test_malformed_requests.py",
    "local/test_tutorials.py",
    "faults/test_migration_kills.py",
    "planner/test_grading.py",
    "planner/test_goals.py",
    "router/test_requests.py",
    "cli/test_publishing.py",
    "router/test_slow_clients.py",
    "worker/test_torch_exactness.py",
    "sdk/test_failing_routers.py",
)
"""Files that take long, with the slow tests or without, the longest first. For `-n` of pytest-xdist: started last, one
of them would run alone at the end."""

NEEDS_AN_OPTION = {
    "sglang": "a real SGLang server: `make test-sglang` installs one and runs this",
    "compose": "real containers: `make test-compose` builds the images and runs this",
    "kube": "the tools of Kubernetes: `make test-kube` installs them and runs this",
    "ray": "Ray: `make test-ray` installs it and runs this",
    "compat": "other projects' clients: `make test-compat` installs them and runs this",
}


def pytest_configure(config: pytest.Config) -> None:
    """A console takes the width that COLUMNS has when it is made, and keeps it: commands are to follow each test's own."""
    os.environ.pop("COLUMNS", None)
    cpu_limit.pytest_configure(config)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sglang", action="store_true", help="run the tests that need a real SGLang server")
    parser.addoption("--compose", action="store_true", help="run the tests that need a container engine")
    parser.addoption("--kube", action="store_true", help="run the tests that need the tools of Kubernetes")
    parser.addoption("--ray", action="store_true", help="run the tests that need Ray")
    parser.addoption("--compat", action="store_true", help="run the tests that need other projects' clients")
    cpu_limit.pytest_addoption(parser)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {ROOT / "tests" / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(FIRST)))  # stable: otherwise as collected
    for option, reason in NEEDS_AN_OPTION.items():
        if not config.getoption(f"--{option}"):
            skip = pytest.mark.skip(reason=reason)
            for item in items:
                if item.get_closest_marker(option):
                    item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What is imported stays: garbage collections need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """A real Redis for the whole run; each mesh has a name of its own in it."""
    folder = tmp_path_factory.mktemp("redis")
    with redis_server(local_redis.find(), free_port(), folder) as server:
        yield server


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisProcess]:
    """A Redis that the test may take away."""
    with redis_server(local_redis.find(), free_port(), tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def sglang_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator["SglangServers"]:
    """SGLang servers that the tests of a file share: those of two files together would need too much memory."""
    from tests.support.sglang import SglangServers

    servers = SglangServers(tmp_path_factory.mktemp("sglang"))
    yield servers
    servers.close()


FAST = {"overhead_ms": 1.0, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": 24}
"""Options of a simulated engine whose replies take no time to speak of."""


def write_mesh_file(folder: Path, tiers: list[dict[str, Any]] | None = None, **parts: Any) -> Path:
    """A mesh file: simulated tiers unless told otherwise, under a name that no other test has, and with free ports."""
    usual: list[dict[str, Any]] = [
        {"name": "small", "model": "sim-small", "threshold": 50},
        {"name": "large", "model": "sim-large"},
    ]
    content: dict[str, Any] = {
        "name": f"test-{uuid.uuid4().hex[:8]}",
        "tiers": [
            ({} if "engine" in tier else {"engine": "simulated", "simulated": FAST}) | tier for tier in (tiers or usual)
        ],
        "judge": {"scorers": [{"name": "confidence", "kind": "confidence"}], "default_scorer": "confidence"},
        "router": {"trace_share": 1.0},
    } | parts
    content["router"] = {"grpc_port": 0, "http_port": 0} | content["router"]
    path = folder / f"{content['name']}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


MeshFileMaker = Callable[..., Path]


@pytest.fixture
def mesh_file(tmp_path: Path) -> MeshFileMaker:
    """Writes mesh files, as `write_mesh_file` does."""
    return functools.partial(write_mesh_file, tmp_path)


MeshRunner = Callable[..., AbstractAsyncContextManager["TestMesh"]]


@pytest.fixture
def run_mesh(redis: RedisProcess, mesh_file: MeshFileMaker) -> MeshRunner:
    """Runs meshes of such files, with so many `routers`."""
    from tests.support.mesh import running_mesh  # it loads every service

    def run(
        tiers: list[dict[str, Any]] | None = None, *, routers: int = 1, **parts: Any
    ) -> AbstractAsyncContextManager["TestMesh"]:
        return running_mesh(mesh_file(tiers, **parts), redis.url, routers=routers)

    return run


@pytest.fixture(scope="module")
async def mesh(
    request: pytest.FixtureRequest, redis: RedisProcess, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator["TestMesh"]:
    """One mesh for all tests of a module: its MESH, the arguments of `write_mesh_file`, with so many ROUTERS."""
    from tests.support.mesh import running_mesh

    path = write_mesh_file(tmp_path_factory.mktemp("mesh"), **getattr(request.module, "MESH", {}))
    async with running_mesh(path, redis.url, routers=getattr(request.module, "ROUTERS", 1)) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models of every family that the torch engine serves, with the shipped tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    from models.training.tokenizer import VOCAB_SIZE, build

    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }
    made = {}
    for name, config, model in (
        ("llama", LlamaConfig(**shape), LlamaForCausalLM),
        ("qwen2", Qwen2Config(**shape), Qwen2ForCausalLM),
        ("qwen3", Qwen3Config(**shape, head_dim=16), Qwen3ForCausalLM),
    ):
        torch.manual_seed(7)
        folder = tmp_path_factory.mktemp(name)
        model(config).save_pretrained(str(folder))
        build().save_pretrained(str(folder))
        made[name] = folder
    return made


@pytest.fixture(scope="session")
def gguf_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A shipped model as a GGUF file, by its tier; written once."""
    folder = tmp_path_factory.mktemp("gguf")

    @functools.cache
    def written(tier: str) -> Path:
        from tests.support.gguf import write_gguf  # it loads torch

        return write_gguf(FAMILY / tier, folder / f"{tier}.gguf")

    return written


@pytest.fixture
def precise_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have llama.cpp keep KV in float32, which flash attention would round: of two tokens that are as good as equal, the
    order of cells in float16 chooses."""
    from penstock.worker_service.engine.llamacpp import binding

    library = binding.load_library(binding.library_path())
    usual = library.llama_context_default_params

    def params() -> binding.ContextParams:
        made: binding.ContextParams = usual()
        made.type_k = made.type_v = made.flash_attn_type = 0
        return made

    monkeypatch.setattr(library, "llama_context_default_params", params)
