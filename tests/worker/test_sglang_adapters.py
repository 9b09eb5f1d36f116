"""A tier may serve its model with a LoRA adapter, on an SGLang server of its own or one that other tiers use, too."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_check import check_mesh_file
from penstock.services.mesh_file import load_mesh_file
from penstock.services.settings import ServiceSettings
from penstock.types.sampling import SamplingParams
from penstock.worker_service.compose import build_engine
from penstock.worker_service.engine.interface import Capability, Engine, EngineUnusable
from penstock.worker_service.engine.sglang.adapter import ServerAdapter, name_at_server
from penstock.worker_service.engine.sglang.adapter_folder import adapter_problem
from penstock.worker_service.engine.sglang.engine import SglangEngine, SglangEngineOptions
from penstock.worker_service.engine.sglang.launch import ServerShape, command
from penstock.worker_service.proto_codec import info_to_proto
from tests.conftest import FAMILY, MeshFileMaker
from tests.support.adapters import merged_model, write_adapter
from tests.support.engines import QUESTIONS, answer, request
from tests.support.mesh import running_mesh
from tests.support.services import RedisProcess
from tests.support.sglang import SglangServers, cpu_shape
from tests.support.sglang_stub import Server, attached
from tests.worker.test_sglang_engine import torch_replies

SMALL = FAMILY / "small"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(SMALL, tmp_path / "legal")


def listed(*adapters: tuple[str, Path]) -> list[dict[str, Any]]:
    """As `/server_info` lists them."""
    return [{"lora_name": name, "lora_path": str(path), "pinned": False} for name, path in adapters]


async def test_every_call_names_the_adapter(adapter: Path) -> None:
    """By the server's name of it; so do calls that verify drafts."""
    server = Server()
    server.info |= {"lora_paths": listed(("other", adapter.parent / "other"), ("law", adapter))}
    async with attached(server, adapter=adapter) as engine:
        await answer(engine, request("a"))
        async for _ in engine._client.generate("ahead", [1], {}):
            pass
    assert [body["lora_path"] for body in server.asked] == ["law", "law"]
    async with attached(server) as engine:
        await answer(engine, request("b"))
    assert "lora_path" not in server.asked[-1]


async def test_an_adapted_model_is_another_model(adapter: Path, tmp_path: Path) -> None:
    """To callers that look for equal models, as moves do, and by its capability."""
    server, other = Server(), write_adapter(SMALL, tmp_path / "other", seed=2)
    server.info |= {"lora_paths": listed(("legal", adapter), ("other", other))}
    digests = set()
    for folder in (None, adapter, other):
        async with attached(server, adapter=folder) as engine:
            digests.add(engine.info.model_digest)
            assert (Capability.ADAPTER in engine.info.capabilities) is (folder is not None)
            told = info_to_proto(engine.info, "", "i", "t").capabilities
            assert (pb.CAPABILITY_ADAPTER in told) is (folder is not None)
    assert len(digests) == 3


async def test_a_server_without_the_adapter_is_refused(adapter: Path) -> None:
    server = Server()
    with pytest.raises(EngineUnusable, match=r"lora_paths: .* adapters: none.*--enable-lora --lora-paths legal=/"):
        async with attached(server, adapter=adapter):
            pass


def test_an_adapter_is_known_by_its_files_and_elsewhere_by_its_name(adapter: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy", write_adapter(SMALL, tmp_path / "other", seed=2)
    shutil.copytree(adapter, copy)
    assert name_at_server([ServerAdapter("x", str(other)), ServerAdapter("y", str(copy))], adapter) == "y"
    assert name_at_server([ServerAdapter("legal", "/another/machine/legal")], adapter) == "legal"
    with pytest.raises(EngineUnusable, match="adapters: legal"):  # the name, but not the files
        name_at_server([ServerAdapter("legal", str(other))], adapter)


def built(file: Path, settings: ServiceSettings) -> Engine:
    mesh = load_mesh_file(file)
    return build_engine(mesh, mesh.tiers[0], settings)


def test_a_folder_without_an_adapter_is_refused_at_the_start(adapter: Path, mesh_file: MeshFileMaker) -> None:
    assert adapter_problem(adapter) == ""
    tier = {"name": "only", "model": str(SMALL), "engine": "sglang", "adapter": str(adapter)}
    file, config = mesh_file([tier]), adapter / "adapter_config.json"
    settings = ServiceSettings.load(mesh_file=file)
    engine = built(file, settings)
    assert isinstance(engine, SglangEngine)
    assert (engine.options.adapter, engine.options.name) == (adapter, "legal")
    right = json.loads(config.read_text())
    for wrong, problem in (
        (json.dumps(right | {"peft_type": "IA3"}), "peft_type must be LORA"),
        (json.dumps(right | {"r": 0}), "r must be a positive integer"),
        ("[]", "peft_type must be LORA"),
        ("{", "adapter_config.json: "),
    ):
        config.write_text(wrong)
        with pytest.raises(SettingsError, match=rf"tiers\[0\].adapter: .*{problem}"):
            built(file, settings)
    config.write_text(json.dumps(right))
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(SettingsError, match="has no adapter_model"):
        built(file, settings)


def test_only_sglang_tiers_have_adapters_and_they_share_no_kv(mesh_file: MeshFileMaker) -> None:
    tiers = [
        {"name": "a", "model": "m", "engine": "torch", "threshold": 50, "adapter": "x"},
        {"name": "b", "model": "m", "engine": "sglang", "adapter": "x", "sglang": {"kv_store": "kv"}},
    ]
    problems = {problem.field: problem.problem for problem in check_mesh_file(mesh_file(tiers)).problems}
    assert "the torch engine does not use it" in problems["tiers[0].adapter"]
    assert "do not share KV" in problems["tiers[1].sglang.kv_store"]


def test_a_server_is_started_with_the_adapter() -> None:
    argv = command(ServerShape("python", "m", "legal", adapter="/a/legal"), 1)
    assert "--enable-lora" in argv
    assert argv[argv.index("--lora-paths") + 1] == "legal=/a/legal"
    assert argv[argv.index("--lora-backend") + 1] == "torch_native"  # the others need a GPU
    assert "--lora-backend" not in command(ServerShape("python", "m", "legal", adapter="/a/legal", device="cuda"), 1)
    assert not [flag for flag in command(ServerShape("python", "m", "m"), 1) if "lora" in flag]


@pytest.mark.sglang
@pytest.mark.timeout(600)
async def test_tiers_share_a_real_server_each_with_its_own_adapter(
    sglang_servers: SglangServers, redis: RedisProcess, mesh_file: MeshFileMaker, adapter: Path, tmp_path: Path
) -> None:
    """A tier's replies are those of a model that has its adapter merged, on the torch engine; all tiers at once."""
    other = write_adapter(SMALL, tmp_path / "other", seed=2)
    paths = ("--lora-paths", f"legal={adapter}", f"other={other}")
    shape = cpu_shape(SMALL, flags=(*cpu_shape(SMALL).flags, "--enable-lora", "--lora-backend", "torch_native", *paths))
    url = await sglang_servers.url(shape)
    wanted = {"small": await torch_replies(SMALL)}
    for folder in (adapter, other):
        wanted[folder.name] = await torch_replies(merged_model(SMALL, folder, tmp_path / f"merged-{folder.name}"))
    assert wanted["small"] != wanted["legal"] != wanted["other"], "otherwise the adapters change nothing"
    tiers: list[dict[str, Any]] = [
        {"name": name, "model": str(SMALL), "engine": "sglang", "threshold": 50, "kv_tokens": 4096}
        | {"sglang": {"endpoint": url}}
        | ({"adapter": str(folder)} if folder else {})
        for name, folder in (("small", None), ("legal", adapter), ("other", other))
    ]
    del tiers[-1]["threshold"]
    async with running_mesh(mesh_file(tiers), redis.url) as mesh, mesh.client() as client:
        for name, replies in wanted.items():
            found = [(await client.generate(q, model=name, temperature=0, max_tokens=60)).text for q in QUESTIONS]
            assert found == replies, name


@pytest.mark.sglang
@pytest.mark.timeout(600)
async def test_a_worker_starts_a_real_server_with_its_adapter(adapter: Path, tmp_path: Path) -> None:
    engine = SglangEngine(
        SglangEngineOptions(
            SMALL, "legal", launch=cpu_shape(SMALL, name="legal", adapter=str(adapter)), adapter=adapter
        )
    )
    await engine.start()
    greedy = SamplingParams(temperature=0.0, max_tokens=60)
    found = [(await answer(engine, request(f"r{i}", q, greedy))).text for i, q in enumerate(QUESTIONS)]
    await engine.close()
    assert found == await torch_replies(merged_model(SMALL, adapter, tmp_path / "merged"))
