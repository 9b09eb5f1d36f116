"""A worker attaches only to a server that has its model, and its LoRA adapter if it has one, and counts other clients."""

import asyncio
import json
import shutil
from contextlib import aclosing
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
from penstock.worker_service.engine.sglang.adapter_folder import adapter_problem
from penstock.worker_service.engine.sglang.attach import adapter_name, problems
from penstock.worker_service.engine.sglang.client import ServerLoad, SglangClient, server_id
from penstock.worker_service.engine.sglang.engine import SglangEngine
from penstock.worker_service.engine.sglang.launch import ServerShape, command
from penstock.worker_service.engine.sglang.others import OtherClients
from penstock.worker_service.engine.sglang.server_link import SglangEngineOptions
from penstock.worker_service.proto_codec import info_to_proto
from tests.conftest import FAMILY, MeshFileMaker
from tests.support.adapters import merged_model, write_adapter
from tests.support.engines import QUESTIONS, answer, request
from tests.support.mesh import running_mesh
from tests.support.services import RedisProcess
from tests.support.sglang import SglangServers, cpu_shape, launched_server
from tests.support.sglang_stub import Server, attached
from tests.worker.test_sglang_engine import torch_replies

SMALL = FAMILY / "small"
NAMES = ("org/small-model", "small")


def found(**told: str | bool) -> str:
    return "; ".join(problems({"version": "0.5.23", "model_path": str(SMALL), **told}, SMALL, NAMES))


def test_a_server_of_the_model_is_accepted_however_it_names_it(tmp_path: Path) -> None:
    """By folder, by a copy of the files, by the id at the hub, or by the served name."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(SMALL, copy)
    assert found() == ""
    assert found(model_path=str(copy)) == ""
    assert found(model_path="org/small-model") == ""
    assert found(model_path="/models/x", served_model_name="small") == ""
    assert found(tokenizer_path=str(SMALL)) == ""


def test_a_server_of_another_model_is_refused() -> None:
    assert "not " + str(SMALL) in found(model_path=str(FAMILY / "large"))
    assert "--served-model-name small" in found(model_path="org/other-model", served_model_name="org/other-model")
    assert "unknown model" in found(model_path="")
    assert "tokenizer_path" in found(tokenizer_path=str(FAMILY / "large"))


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        ("0.5.20", True),
        ("0.5.23.post1", True),
        ("0.5.31rc1", True),
        ("0.5.19", False),
        ("0.4.99", False),
        ("0.6.0", False),
        ("1.0", False),
        ("", False),
        ("main", False),
    ],
)
def test_only_known_versions_are_accepted(version: str, accepted: bool) -> None:
    assert ("version" not in found(version=version)) is accepted


def test_servers_that_do_not_generate_whole_replies_are_refused() -> None:
    assert "embeddings" in found(is_embedding=True)
    assert "prefill" in found(disaggregation_mode="prefill")
    assert found(disaggregation_mode="null") == ""


async def test_a_worker_does_not_start_on_a_server_of_another_model() -> None:
    server = Server()
    server.info = {"version": "0.5.23", "model_path": str(FAMILY / "large"), "served_model_name": "large"}
    with pytest.raises(EngineUnusable, match=r"model_path: the server has .*large, not .*small"):
        async with attached(server):
            pass


async def test_copies_behind_one_server_reuse_no_prefix_for_us() -> None:
    """Which data-parallel rank gets a request is the server's affair, and each rank has a cache of its own."""
    shared = {Capability.PREFIX_REUSE, Capability.PREFIX_TRANSFER}
    for copies in (1, 2):
        server = Server()
        server.info |= {"dp_size": copies}
        async with attached(server) as engine:
            assert shared <= engine.info.capabilities if copies == 1 else not shared & engine.info.capabilities
            await answer(engine, request("a"))
        assert not [key for body in server.asked for key in body if "rank" in key]


@pytest.mark.parametrize("spelling", [{"attn_dp_size": 8, "dp_size": 1}, {"dp_size": 8}])
async def test_groups_of_attention_are_no_copies_of_the_model(spelling: dict[str, int]) -> None:
    """However the version of the server spells it: eight groups on eight GPUs, each with a prefix cache of its own."""
    server = Server()
    server.info |= {"tp_size": 8, "ep_size": 8, "enable_dp_attention": True, **spelling}
    async with attached(server) as engine:
        info = await engine._client.info()
        assert Capability.PREFIX_REUSE not in engine.info.capabilities
    assert (info.tp, info.ep, info.attn_dp, info.dp) == (8, 8, 8, 1)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, "slo needs attn_dp 1, not 8"),
        ({"dp_size": 2}, "slo needs dp 1, not 2"),
    ],
)
async def test_slos_are_kept_only_at_a_server_of_one_batch(sizes: dict[str, Any], problem: str) -> None:
    """Of a running server the mesh file does not say the shape. Without SLOs, the worker attaches to it."""
    server = Server()
    server.info |= sizes
    with pytest.raises(
        EngineUnusable, match=rf"the SGLang server at http://.*: batch_policy {problem}: .* KV of its own"
    ):
        async with attached(server, keeps_slos=True):
            pass
    assert not server.asked, "nothing was measured"
    async with attached(server) as engine:
        assert Capability.SLO_PREDICTED not in engine.info.capabilities


async def test_every_call_has_an_id_that_begins_no_other() -> None:
    """A server refuses an id that it has just seen, and aborts all requests whose ids begin with the given one."""
    server = Server()
    async with attached(server) as engine:
        for name in ("ab", "ab", "ab:1", "ab"):
            await answer(engine, request(name))
    ids = [str(body["rid"]) for body in server.asked]
    assert len(ids) == len(set(ids)) == 4
    assert not [(a, b) for a in ids for b in ids if a != b and b.startswith(a)]
    assert [rid.partition(":")[2] for rid in ids] == ["ab", "ab", "ab:1", "ab"]


async def test_requests_of_other_clients_are_part_of_the_load() -> None:
    """So that a server that others keep busy is not taken for idle."""
    server = Server()
    server.load = {"num_running_reqs": 3, "num_waiting_reqs": 2, "num_used_tokens": 600}
    async with attached(server) as engine, asyncio.timeout(60):
        while engine.load().requests != 5:
            await asyncio.sleep(0.05)
        load = engine.load()
        assert load.running_tokens == (200, 200, 200)
        assert len(load.queued_tokens) == 2
        server.load = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0}
        while engine.load().requests:
            await asyncio.sleep(0.05)


def test_own_requests_are_not_counted_as_others() -> None:
    """Nor one that began or ended between the two counts: another client's request is there for two polls."""

    def load(running: int, waiting: int = 0, used: int = 0) -> ServerLoad:
        return ServerLoad(used, 8192, 8, running, waiting)

    others = OtherClients()
    others.observe(load(2), [10, 10])
    assert (others.running, others.waiting) == (0, 0)
    others.observe(load(2), [10])  # one has just ended
    assert others.running == 0
    others.observe(load(1), [10])
    assert others.running == 0
    for _ in range(2):
        others.observe(load(3, waiting=1, used=310), [10])
    assert (others.running, others.waiting, others.tokens_each) == (2, 1, 150)


@pytest.mark.sglang
@pytest.mark.timeout(600)
async def test_a_real_server_is_known_counted_and_keeps_to_its_store(tmp_path: Path) -> None:
    """Its model is recognised, another one refused; another client's request is load; its files stay within their limit."""
    store, limit = tmp_path / "store", 1 << 20
    store.mkdir()
    shape = cpu_shape(SMALL, name="known-as", kv_store=str(store), kv_store_bytes=limit, kv_tokens=2048)
    with launched_server(shape, tmp_path / "server.log") as url:
        with pytest.raises(EngineUnusable, match="model_path"):
            await SglangEngine(SglangEngineOptions(FAMILY / "medium", "medium", endpoint=url)).start()
        engine = SglangEngine(SglangEngineOptions(SMALL, "small", endpoint=url))
        await engine.start()
        assert engine.info.engine == "sglang"
        assert (await answer(engine, request("ab"))).tokens == (await answer(engine, request("ab"))).tokens
        other = SglangClient(url)
        sampling = {"temperature": 0.0, "max_new_tokens": 1500, "ignore_eos": True}
        async with aclosing(other.generate(server_id("other"), [1, 2, 3], sampling)) as pieces, asyncio.timeout(120):
            async for _ in pieces:
                if engine.load().requests:
                    break
            assert len(engine.load().running_tokens) == 1
        for i in range(12):
            prompt = [(7 * i + 3 * j) % 250 for j in range(600)]
            async with asyncio.timeout(120):
                async for _ in other.generate(server_id(f"p{i}"), prompt, {"max_new_tokens": 1}):
                    pass
        await other.close()
        await engine.close()
        size = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
        written = 12 * 600 * 2 * 2 * 2 * 16 * 4  # tokens * layers * (key, value) * KV heads * dim * bytes
        assert written > 2 * limit, "otherwise the limit is not tested"
        assert 0 < size <= limit


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
    assert adapter_name({"x": str(other), "y": str(copy)}, adapter) == "y"
    assert adapter_name({"legal": "/another/machine/legal"}, adapter) == "legal"
    with pytest.raises(EngineUnusable, match="adapters: legal"):  # the name, but not the files
        adapter_name({"legal": str(other)}, adapter)


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
