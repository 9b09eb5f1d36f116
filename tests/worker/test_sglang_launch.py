"""How SGLang servers are started, and what a worker does with one that cannot run. Needs no SGLang."""

import asyncio
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.services.chart import SERVER_PORT, values_of
from penstock.services.domain.server_nodes import ServerNode
from penstock.services.extensions.engines import engine_of
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_check import check_mesh_file
from penstock.services.mesh_file import load_mesh_file
from penstock.services.settings import ServiceSettings
from penstock.worker_service.compose import build_engine
from penstock.worker_service.engine.extension import EngineExtension, EngineSite
from penstock.worker_service.engine.interface import EngineUnusable
from penstock.worker_service.engine.sglang.engine import SglangEngine
from penstock.worker_service.engine.sglang.launch import ServerShape, command, environment
from penstock.worker_service.engine.sglang.server import TURN_POLL_S, ServerProcess, start_turn
from penstock.worker_service.engine.sglang.server_link import SglangEngineOptions
from tests.conftest import FAMILY, MeshFileMaker
from tests.support.present import present

MODEL = str(FAMILY / "small")


def flags_of(shape: ServerShape) -> dict[str, str]:
    """Options by name; switches have no value."""
    argv = command(shape, 30_000)
    assert argv[:3] == [shape.python, "-m", "sglang.launch_server"]
    found, name = dict[str, str](), ""
    for part in argv[3:]:
        if part.startswith("--"):
            name = part
            found[name] = ""
        else:
            found[name] = part
    return found


def test_every_setting_reaches_the_command_line(tmp_path: Path, mesh_file: MeshFileMaker) -> None:
    tier = {
        "name": "only",
        "model": MODEL,
        "engine": "sglang",
        "served_model_name": "known-as",
        "device": "cuda:1",
        "dtype": "bfloat16",
        "threads": 3,
        "kv_block_tokens": 32,
        "max_running": 40,
        "max_queued": 60,
        "max_step_tokens": 2050,
        "max_context_tokens": 8192,
        "workers": 2,
        "sglang": {
            "python": "/opt/sglang/bin/python",
            "tp": 2,
            "pp": 3,
            "dp": 1,
            "gpus": list(range(12)),
            "mem_fraction": 0.8,
            "deterministic": True,
            "kv_store": "store",
            "kv_store_gib": 3,
            "port": 31_000,
            "flags": ["--log-level", "warning"],
            "env": {"NCCL_DEBUG": "WARN"},
        },
    }
    engine = built(mesh_file([tier]), 1)
    assert engine.options.port == 31_001
    assert engine.options.max_requests == 100
    shape = present(engine.options.launch)
    flags = flags_of(shape)
    wanted = {
        "--model-path": MODEL,
        "--served-model-name": "known-as",
        "--port": "30000",
        "--device": "cuda",
        "--base-gpu-id": "1",
        "--dtype": "bfloat16",
        "--tp-size": "2",
        "--pp-size": "3",
        "--dp-size": "1",
        "--page-size": "32",
        "--chunked-prefill-size": "2048",  # whole pages
        "--max-running-requests": "40",
        "--max-queued-requests": "100",
        "--mem-fraction-static": "0.8",
        "--context-length": "8192",
        "--hicache-storage-backend": "file",
        "--log-level": "warning",
    }
    assert {name: flags.get(name) for name in wanted} == wanted
    assert "--enable-deterministic-inference" in flags
    assert "--skip-tokenizer-init" not in flags, "forms of replies need it"
    tier["sglang"]["structured_output"] = False  # type: ignore[index]
    assert "--skip-tokenizer-init" in flags_of(present(built(mesh_file([tier]), 1).options.launch))
    assert "--max-total-tokens" not in flags
    assert environment(shape) == {
        "OMP_NUM_THREADS": "3",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
        "CUDA_VISIBLE_DEVICES": "6,7,8,9,10,11",
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "store"),
        "SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE": str(3 * 2**30 // 2),  # an equal part for each of two workers
        "NCCL_DEBUG": "WARN",
    }
    plain = flags_of(ServerShape("python", "m", "m", kv_tokens=777))
    assert plain["--max-total-tokens"] == "777"
    assert not {"--mem-fraction-static", "--context-length", "--enable-hierarchical-cache", "--enable-trace"} & set(
        plain
    )
    assert flags_of(ServerShape("python", "m", "m", trace_to="c:4317"))["--otlp-traces-endpoint"] == "c:4317"


def built(file: Path, index: int = 0) -> SglangEngine:
    """The engine of the first tier's worker with this index."""
    mesh = load_mesh_file(file)
    engine = build_engine(mesh, mesh.tiers[0], ServiceSettings.load(mesh_file=file, worker_index=index))
    assert isinstance(engine, SglangEngine)
    return engine


def shape_of(mesh_file: MeshFileMaker, index: int = 0, **tier: object) -> ServerShape:
    """The server that the worker with this index starts."""
    file = mesh_file([{"name": "only", "model": MODEL, "engine": "sglang", **tier}])
    return present(built(file, index).options.launch)


def test_the_chart_starts_servers_as_workers_do(mesh_file: MeshFileMaker) -> None:
    """But for what is another machine's: interpreter, port, which GPUs, and the folder that relative paths begin at."""
    tier = {
        "name": "only",
        "model": "models/small",
        "engine": "sglang",
        "device": "cuda",
        "workers": 2,
        "max_running": 40,
        "sglang": {"tp": 2, "dp": 2, "kv_store": "store", "deterministic": True, "flags": ["--log-level", "warning"]},
    }
    file = mesh_file([tier])
    (file.parent / "models").symlink_to(FAMILY)
    shape = present(built(file, 1).options.launch)
    own = command(shape, SERVER_PORT)[1:]
    (worker,) = values_of(file)["workers"]
    chart = worker["server"]["command"][1:]
    here, there = str(file.parent), "/etc/penstock"
    assert chart == [part.replace(here, there) for part in own if part not in ("--base-gpu-id", "4")]
    variables = {name: text.replace(here, there) for name, text in environment(shape).items()}
    assert (worker["server"]["environment"], worker["gpus"]) == (variables, 4)


def test_a_gpus_memory_decides_what_the_mesh_file_does_not(mesh_file: MeshFileMaker) -> None:
    """SGLang sizes the KV cache and the chunks of prompts for its GPU; a CPU has our defaults."""
    sizes = {"--max-total-tokens", "--chunked-prefill-size", "--mem-fraction-static"}
    assert not sizes & set(flags_of(shape_of(mesh_file, device="cuda")))
    on_cpu = flags_of(shape_of(mesh_file))
    assert (on_cpu["--max-total-tokens"], on_cpu["--chunked-prefill-size"]) == ("32768", "512")
    chosen = flags_of(shape_of(mesh_file, device="cuda", kv_tokens=9000, max_step_tokens=100))
    assert (chosen["--max-total-tokens"], chosen["--chunked-prefill-size"]) == ("9000", "96")


def test_workers_without_listed_gpus_take_the_next_ones(mesh_file: MeshFileMaker) -> None:
    tier: dict[str, Any] = {"device": "cuda", "workers": 3, "sglang": {"tp": 2}}
    assert [flags_of(shape_of(mesh_file, i, **tier))["--base-gpu-id"] for i in range(3)] == ["0", "2", "4"]
    fixed = {**tier, "device": "cuda:5"}
    assert [flags_of(shape_of(mesh_file, i, **fixed))["--base-gpu-id"] for i in range(3)] == ["5", "5", "5"]


def test_torch_workers_take_a_gpu_each(mesh_file: MeshFileMaker) -> None:
    def devices(device: str) -> list[str]:
        file = mesh_file([{"name": "only", "model": MODEL, "engine": "torch", "device": device}])
        mesh, settings = load_mesh_file(file), [ServiceSettings.load(mesh_file=file, worker_index=i) for i in range(3)]
        return [EngineSite(mesh, mesh.tiers[0], each).device() for each in settings]

    assert devices("cuda") == ["cuda:0", "cuda:1", "cuda:2"]
    assert devices("cuda:1") == ["cuda:1"] * 3
    assert devices("cpu") == ["cpu"] * 3


def test_copies_of_the_model_have_limits_of_their_own(mesh_file: MeshFileMaker) -> None:
    """SGLang applies --max-running-requests to each copy; the worker lets as many requests through as all of them run."""
    limits = {"max_running": 40, "max_queued": 60, "sglang": {"dp": 2}}
    engine = built(mesh_file([{"name": "only", "model": MODEL, "engine": "sglang", **limits}]))
    flags = flags_of(present(engine.options.launch))
    assert (flags["--max-running-requests"], flags["--max-queued-requests"]) == ("40", "100")
    assert engine.options.max_requests == 140


def test_attention_groups_share_the_limits_of_the_tier(mesh_file: MeshFileMaker) -> None:
    """SGLang divides --max-running-requests and --chunked-prefill-size between the groups; --max-total-tokens is of each."""
    limits: dict[str, Any] = {"device": "cuda", "max_running": 64, "kv_tokens": 80_000, "max_step_tokens": 2048}
    flags = flags_of(shape_of(mesh_file, **limits, sglang={"tp": 8, "ep": 8, "attn_dp": 8}))
    named = ("--tp-size", "--ep-size", "--attn-dp-size", "--dp-size", "--max-running-requests", "--max-total-tokens")
    assert [flags[name] for name in named] == ["8", "8", "8", "1", "64", "10000"]
    assert flags["--chunked-prefill-size"] == "2048"
    assert not {"--ep-size", "--attn-dp-size"} & set(flags_of(shape_of(mesh_file, sglang={"tp": 8})))


def test_a_tier_of_one_worker_has_no_store(mesh_file: MeshFileMaker) -> None:
    """It has no other server to share with, and would write every page to disk."""
    store = {"kv_store": "store"}
    assert shape_of(mesh_file, workers=1, sglang=store).kv_store == ""
    assert shape_of(mesh_file, workers=2, sglang=store).kv_store


async def test_servers_that_size_host_memory_start_one_after_the_other() -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        async with start_turn():
            entered.set()
            await leave.wait()

    async def second() -> bool:
        async with start_turn():
            return leave.is_set()

    one = asyncio.create_task(first())
    await entered.wait()
    two = asyncio.create_task(second())
    done, _ = await asyncio.wait([two], timeout=3 * TURN_POLL_S)
    assert not done
    leave.set()
    await one
    assert await two


def test_flags_that_no_worker_can_work_with_are_refused(mesh_file: MeshFileMaker) -> None:
    flags = ["--log-level", "warning", "--lora-paths=a", "--nnodes", "2"]
    file = mesh_file([{"name": "only", "model": "m", "engine": "sglang", "sglang": {"flags": flags}}])
    fields = {problem.field: problem.problem for problem in check_mesh_file(file).problems}
    assert "--lora-paths is not supported" in fields["tiers[0].sglang.flags[2]"]
    assert "--nnodes is not supported: a worker starts servers on its own machine" in fields["tiers[0].sglang.flags[3]"]
    assert not any(field.endswith(("flags[0]", "flags[1]", "flags[4]")) for field in fields)


def test_the_parts_of_a_server_over_nodes_know_their_place(mesh_file: MeshFileMaker) -> None:
    """Each has all flags of the whole server; a place that is none is refused by name, and so is an engine without parts."""
    tiers = [
        {"name": "only", "model": MODEL, "engine": "sglang", "threshold": 50, "device": "cuda"}
        | {"sglang": {"tp": 8, "pp": 2}},
        {"name": "own", "model": MODEL, "engine": "torch"},
    ]
    file = mesh_file(tiers)

    def part(tier: str, node: str) -> list[str]:
        mesh, settings = load_mesh_file(file), ServiceSettings.load(mesh_file=file, worker_node=node)
        engine = engine_of(mesh, mesh.tier(tier))
        assert isinstance(engine, EngineExtension)
        return engine.server_part(EngineSite(mesh, mesh.tier(tier), settings)).command

    argv = part("only", "1/2@10.0.0.7:20001")
    options = dict(itertools.pairwise(argv))
    assert (options["--tp-size"], options["--pp-size"]) == ("8", "2")
    assert (options["--nnodes"], options["--node-rank"]) == ("2", "1")
    assert options["--dist-init-addr"] == "10.0.0.7:20001"
    for wrong in ("2/2@h:1", "1/2", "1@h:2"):
        with pytest.raises(SettingsError, match=r"PENSTOCK_WORKER_NODE: must be like 1/2@10\.0\.0\.7:20000"):
            part("only", wrong)
    with pytest.raises(SettingsError, match="PENSTOCK_WORKER_NODE: the torch engine has no servers over several nodes"):
        part("own", "1/2@h:1")


async def test_a_part_of_a_server_is_not_started_again_by_its_worker() -> None:
    """Whoever starts the other parts does, with all of them."""
    server = ServerProcess(ServerShape(sys.executable, "m", "m", node=ServerNode(0, 2, "127.0.0.1:9")), 9)
    await server.start()
    async with asyncio.timeout(30):
        while not server.lost:  # this Python has no sglang
            await asyncio.sleep(0.01)
    assert server.restarts == 0
    await server.stop()


def test_each_worker_has_its_own_gpus(mesh_file: MeshFileMaker) -> None:
    own: dict[str, Any] = {"device": "cuda", "workers": 2, "sglang": {"tp": 2, "gpus": [4, 5, 6, 7]}}
    assert [shape_of(mesh_file, i, **own).gpus for i in range(2)] == [(4, 5), (6, 7)]
    assert shape_of(mesh_file, 5, device="cuda", sglang={"tp": 2}).gpus == ()
    with pytest.raises(SettingsError, match=r"only: sglang\.gpus: no 2 GPUs for worker 2 among 4"):
        shape_of(mesh_file, 2, **own)


async def test_a_server_that_cannot_run_ends_the_start_with_a_word() -> None:
    """This Python has no sglang: every start ends at once."""
    launch = ServerShape(sys.executable, "m", "m")
    engine = SglangEngine(SglangEngineOptions(FAMILY / "small", "m", launch=launch))
    with pytest.raises(EngineUnusable, match="ends whenever it is started"):
        await engine.start()
