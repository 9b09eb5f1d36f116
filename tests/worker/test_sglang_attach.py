"""A worker attaches only to a server that can serve its model, and counts what other clients run there."""

import asyncio
import shutil
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from penstock.worker_service.engine.interface import Capability, EngineUnusable
from penstock.worker_service.engine.sglang.attach import ServerIdentity, problems
from penstock.worker_service.engine.sglang.client import ServerLoad, SglangClient, server_id
from penstock.worker_service.engine.sglang.engine import SglangEngine, SglangEngineOptions
from penstock.worker_service.engine.sglang.others import OtherClients
from tests.conftest import FAMILY
from tests.support.engines import answer, request
from tests.support.sglang import cpu_shape, launched_server
from tests.support.sglang_stub import Server, attached

SMALL = FAMILY / "small"
NAMES = ("org/small-model", "small")


def found(**identity: str | bool) -> str:
    values: dict[str, str | bool] = {"version": "0.5.23", "model_path": str(SMALL), **identity}
    return "; ".join(problems(ServerIdentity(**values), SMALL, NAMES))  # type: ignore[arg-type]


def test_a_server_of_the_model_is_accepted_however_it_names_it(tmp_path: Path) -> None:
    """By folder, by a copy of the files, by the id at the hub, or by the served name."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(SMALL, copy)
    assert found() == ""
    assert found(model_path=str(copy)) == ""
    assert found(model_path="org/small-model") == ""
    assert found(model_path="/models/x", served_name="small") == ""
    assert found(tokenizer_path=str(SMALL)) == ""


def test_a_server_of_another_model_is_refused() -> None:
    assert "not " + str(SMALL) in found(model_path=str(FAMILY / "large"))
    assert "--served-model-name small" in found(model_path="org/other-model", served_name="org/other-model")
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
    assert "embeddings" in found(embeds=True)
    info = {"version": "0.5.23", "model_path": str(SMALL), "disaggregation_mode": "prefill"}
    assert any("prefill" in problem for problem in problems(ServerIdentity.from_info(info), SMALL, NAMES))
    whole = ServerIdentity.from_info({**info, "disaggregation_mode": "null"})
    assert not [*problems(whole, SMALL, NAMES)]


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
