"""What a mesh keeps of its users' prompts, where mesh file and tenant consent: which, how many, how long; who reads them."""

import asyncio
import logging
import random
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from pydantic import ValidationError

import penstock
from penstock.planner_service.question.score_predictor import LEAST_PROMPTS
from penstock.router_service.domain.events import RouterRequest
from penstock.router_service.telemetry.recorders import HELD_PROMPTS, PromptSampler
from penstock.services.access.api_keys import KeyFile, new_key
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.prompt_samples import MAX_SAMPLE_BYTES, PromptSample
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.score_predictor_file import read_score_predictor
from penstock.services.state.connection import StateUnavailable, connect
from penstock.services.state.keys import Keys
from penstock.services.state.prompt_samples import PromptSampleStore
from penstock.types.events import Finished, TierSummary
from penstock.types.prompts import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from penstock.types.replies import FinishReason, Usage
from penstock.types.sampling import SamplingParams
from penstock.types.structured import StructuredOutput
from penstock.types.tools import Tool, ToolUse
from tests.conftest import MeshFileMaker, MeshRunner
from tests.support.cli import penstock as cli
from tests.support.inputs import read_quality
from tests.support.mesh import TestMesh, running_mesh
from tests.support.services import RedisProcess
from tests.support.waiting import until_answered

SECRET = "a secret of nobody"
ALL: dict[str, Any] = {"share": 1.0}
USAGE = Usage(3, 0, 7)
DONE = Finished(
    FinishReason.STOP, "small", USAGE, (TierSummary("small", "m", "i", 80.0, 50.0, True, USAGE, 0.1),), 0.1, 2.0, "t"
)


def chat(text: str) -> ChatPrompt:
    return ChatPrompt((ChatMessage("user", text),))


def sample(text: str) -> PromptSample:
    return PromptSample((("user", text),))


async def stored(mesh: TestMesh, count: int) -> list[Any]:
    """The sampled prompts, once there are so many."""
    async with mesh.client() as client:

        async def enough() -> list[Any]:
            found = (await client.sampled_prompts())[0]
            return found if len(found) >= count else []

        return await until_answered(enough)


async def measure(mesh: TestMesh, *options: object, status: int = 0) -> None:
    """Run `penstock measure` on the sampled prompts of a mesh."""
    where = ("--target", mesh.router.address, "--admin", mesh.router.admin_address)
    done = await asyncio.to_thread(cli, "measure", "--live", *options, *where)
    assert done.returncode == status, done.output


async def test_a_mesh_that_asks_for_it_has_its_prompts_measured(
    run_mesh: MeshRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Over gRPC and Redis to the quality file, which has no text; what is measured is not sampled again."""
    caplog.set_level(logging.DEBUG)
    out = tmp_path / "judged.csv"
    async with run_mesh(router={"sample_prompts": ALL}) as mesh, mesh.client() as client:
        for text in (f"{SECRET} 1", f"{SECRET} 2", f"{SECRET} 2"):
            await client.generate(text, max_tokens=4)
        await client.generate(f"{SECRET} of one tier", max_tokens=4, model="large")
        found = await stored(mesh, 3)
        assert found == [[{"role": "user", "content": f"{SECRET} {i}"}] for i in (2, 2, 1)]
        await measure(mesh, "--out", out, "--max-tokens", 4)
        assert len(out.read_text().splitlines()) == 3  # the head, and each prompt once
        assert SECRET not in out.read_text()
        await asyncio.sleep(1.5)
        assert len((await client.sampled_prompts())[0]) == 3
        with pytest.raises(penstock.InvalidRequestError, match="page_token"):
            await client.sampled_prompts("0-0 COUNT 1")
    assert SECRET not in caplog.text


@pytest.mark.slow
async def test_a_score_predictor_is_trained_on_live_prompts(run_mesh: MeshRunner, tmp_path: Path) -> None:
    """What routers load, and the planner reads; neither has text."""
    out, predictor = tmp_path / "judged.csv", tmp_path / "predictor.json"
    texts = [f"{SECRET} {i}" for i in range(LEAST_PROMPTS)]
    async with run_mesh(router={"sample_prompts": ALL}) as mesh, mesh.client() as client:
        await asyncio.gather(*(client.generate(text, max_tokens=2) for text in texts))
        await stored(mesh, len(texts))
        await measure(mesh, "--out", out, "--predictor", predictor, "--max-tokens", 2)
    tiers = read_score_predictor(predictor).tiers
    judged = read_quality(out, tiers)
    assert len(judged) == len(texts)
    assert judged.predicted is not None
    assert SECRET not in predictor.read_text() + out.read_text()


async def test_without_the_setting_nothing_is_kept_and_what_was_kept_goes(
    redis: RedisProcess, mesh_file: MeshFileMaker
) -> None:
    file = mesh_file()
    name = yaml.safe_load(file.read_text())["name"]
    store = connect(redis.url)
    await store.xadd(f"{name}:prompts", {"p": b"[]"})  # of a time when the mesh file asked for it
    async with running_mesh(file, redis.url) as mesh, mesh.client() as client:
        assert not await store.exists(f"{name}:prompts")
        await client.generate(SECRET, max_tokens=4)
        await asyncio.sleep(1.5)
        assert not await store.exists(f"{name}:prompts")
        with pytest.raises(penstock.PenstockError, match="sample_prompts"):
            await client.sampled_prompts()
        await measure(mesh, status=1)
    await store.aclose()


async def test_only_tenants_that_consent_are_sampled(
    redis: RedisProcess, mesh_file: MeshFileMaker, tmp_path: Path
) -> None:
    """By gRPC and HTTP; the other tenant's prompts are in no key of Redis. Clients cannot read any."""
    tenants = [{"name": "open", "sample_prompts": True}, {"name": "closed"}]
    path = mesh_file(router={"sample_prompts": ALL}, access={"keys": "keys.json", "tenants": tenants})
    file, keys = KeyFile(tmp_path / "keys.json"), {}
    for tenant in ("open", "closed"):
        key, keys[tenant] = new_key(tenant, time.time())
        file.add(key)
    async with running_mesh(path, redis.url) as mesh:
        for tenant in ("closed", "open"):
            async with mesh.client(api_key=keys[tenant]) as client:
                await client.generate(f"{tenant} by gRPC", max_tokens=4)
            body = {"model": "cascade", "messages": [{"role": "user", "content": f"{tenant} by HTTP"}], "max_tokens": 4}
            headers = {"Authorization": f"Bearer {keys[tenant]}"}
            url = f"{mesh.http}/v1/chat/completions"
            async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=body) as response:
                assert response.status == 200
        found = await stored(mesh, 2)
        assert [messages[-1]["content"] for messages in found] == ["open by HTTP", "open by gRPC"]
        raw = repr(await mesh.router.redis.xrange(mesh.router.keys.prompts))
        assert "open by" in raw
        assert "closed" not in raw
        assert not any(key in raw for key in keys.values())
        as_client = penstock.AsyncClient(
            mesh.router.address, admin=mesh.router.address, api_key=keys["open"], retry=penstock.RetryPolicy(attempts=1)
        )
        async with as_client as client:
            with pytest.raises(penstock.PenstockError):  # the client listener does not have it
                await client.sampled_prompts()


async def test_the_store_is_capped_in_number_and_age(redis: RedisProcess) -> None:
    client, keys = connect(redis.url), Keys("mesh-of-samples")
    store = PromptSampleStore(client, keys, 10, 60.0)
    await client.xadd(keys.prompts, {"p": sample("old").to_json()}, id="1000-0")
    assert (await store.page("", 10))[0] == []  # too old to be read
    await store.append([sample(str(i)) for i in range(4)])
    assert await client.xlen(keys.prompts) == 4  # too old to be kept
    assert 0 < await client.pttl(keys.prompts) <= 60_000
    for i in range(4, 24, 5):
        await store.append([sample(str(j)) for j in range(i, i + 5)])
    found, token = await store.page("", 6)
    more, end = await store.page(token, 6)
    assert [one.messages[0][1] for one in found + more] == [str(i) for i in range(23, 13, -1)]
    assert end == ""
    with pytest.raises(InvalidRequest, match="page_token"):
        await store.page("x", 10)
    await store.delete()
    assert not await client.exists(keys.prompts)
    await client.aclose()


async def test_an_error_of_redis_says_nothing_of_the_prompt(
    redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver's own message quotes the command that failed, text included."""
    client, keys = connect(redis.url), Keys("mesh-of-errors")
    await client.set(keys.prompts, "no stream")
    store = PromptSampleStore(client, keys, 10, 60.0)
    with pytest.raises(StateUnavailable) as caught:
        await store.append([sample(SECRET)])
    assert SECRET not in repr(caught.value)
    assert caught.value.__cause__ is None
    async with PromptSampler(store, 1.0, random.Random(1)) as sampler:
        sampler.finished(request(chat(SECRET)), DONE)
    assert "sampled prompts cannot be recorded yet" in caplog.text
    assert SECRET not in caplog.text
    await client.delete(keys.prompts)
    await client.aclose()


def request(prompt: Prompt, *, model: str = "cascade", consent: bool = True) -> RouterRequest:
    return RouterRequest("r", model, prompt, SamplingParams(), 0.0, may_be_sampled=consent)


class _Held(PromptSampleStore):
    """A store that takes nothing until it is told to."""

    def __init__(self) -> None:
        self.up, self.written = False, list[PromptSample]()

    async def append(self, samples: Any) -> None:
        if not self.up:
            raise StateUnavailable("down")
        self.written += samples


async def test_a_share_is_sampled_and_few_are_held() -> None:
    store = _Held()
    async with PromptSampler(store, 0.25, random.Random(3)) as sampler:
        for i in range(400):
            sampler.finished(request(chat(f"{i}")), DONE)
            sampler.finished(request(chat("no"), consent=False), DONE)
            sampler.finished(request(chat("no"), model="small"), DONE)
        store.up = True
    assert 70 <= len(store.written) <= 130
    assert "no" not in {one.messages[0][1] for one in store.written}
    store = _Held()
    async with PromptSampler(store, 1.0, random.Random(3)) as sampler:
        for i in range(HELD_PROMPTS + 50):
            sampler.finished(request(chat(f"{i}")), DONE)
        store.up = True
    assert [int(one.messages[0][1]) for one in store.written] == list(range(50, HELD_PROMPTS + 50))


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        (TextPrompt(SECRET), SamplingParams()),
        (TokenPrompt((1, 2)), SamplingParams()),
        (ChatPrompt(()), SamplingParams()),
        (ChatPrompt((ChatMessage("user", "x"),), ToolUse((Tool("f", "", "{}"),))), SamplingParams()),
        (ChatPrompt((ChatMessage("tool", "x", (), "call"),)), SamplingParams()),
        (chat("x"), SamplingParams(structured_output=StructuredOutput(json_object=True))),
        (chat("x" * MAX_SAMPLE_BYTES), SamplingParams()),
        (chat("\u4f60" * (MAX_SAMPLE_BYTES // 3)), SamplingParams()),  # few characters, many bytes
    ],
)
def test_what_cannot_be_measured_or_is_too_large_is_left_out(prompt: Prompt, sampling: SamplingParams) -> None:
    assert PromptSample.of(prompt, sampling) is None


@pytest.mark.parametrize("text", ["hello", 'quotes " and \\ and \n', "\u4f60\u597d", "half a pair: \ud800"])
def test_a_sample_comes_back_as_it_was(text: str) -> None:
    made = PromptSample.of(ChatPrompt((ChatMessage("system", "be brief"), ChatMessage("user", text))), SamplingParams())
    assert made is not None
    back = PromptSample.from_json(made.to_json())
    assert back.messages == (("system", "be brief"), ("user", text.replace("\ud800", "?")))


def test_a_share_that_no_tenant_consents_to_is_refused(mesh_file: MeshFileMaker) -> None:
    content = yaml.safe_load(mesh_file(router={"sample_prompts": ALL}).read_text())
    assert MeshFile.model_validate(content).router.sample_prompts.share == 1.0
    with pytest.raises(ValidationError, match=r"router\.sample_prompts\.share"):
        MeshFile.model_validate({**content, "access": {"tenants": [{"name": "a"}]}})
    for bad in ({"share": 1.5}, {"max_prompts": 100_000}, {"max_age_s": 1}):
        with pytest.raises(ValidationError):
            MeshFile.model_validate({**content, "router": {"sample_prompts": bad}})


@pytest.mark.parametrize("more", [(), ("--live", "prompts.jsonl"), ("--live", "--labelled", "l.jsonl")])
def test_measure_needs_one_source_of_prompts(more: tuple[str, ...], tmp_path: Path) -> None:
    done = cli("measure", *more, "--out", tmp_path / "out.csv")
    assert done.returncode == 2
    assert "--live" in done.output
