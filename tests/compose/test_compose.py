"""docker-compose.yml in real containers: `make test-compose`. The tests share one mesh and leave it as they found it.

Skipped where no container engine with compose runs, or where the base images cannot be had.
"""

import asyncio
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock import AsyncClient, InstanceChanged, TierStarted, Tokens
from penstock.services.processes import free_port
from tests.conftest import ROOT
from tests.support.containers import ComposeProject, Engine, NoEngineError, run

pytestmark = [pytest.mark.compose, pytest.mark.timeout(2400)]

BASES = ("docker.io/library/python:3.12-slim", "docker.io/library/redis:7.4-alpine")
STREAMS = 50
START_S = 300.0  # images are built by then; engines compile their kernels at the first start
AFTER_SOURCE = 4  # layers above the dependencies: the wheel, its installation, the kernels, the health check
UNUSED = ("models/training/", "benchmarks/", "docs/", "tests/")  # by images


@pytest.fixture(scope="module")
def engine() -> Engine:
    try:
        found = Engine.find()
        for base in BASES:
            found.require(base)
    except NoEngineError as error:
        pytest.skip(f"no containers here: {error}")
    return found


@pytest.fixture(scope="module")
def images(engine: Engine) -> dict[str, dict[str, str]]:
    """The images of the cpu profile, built."""
    project = ComposeProject(engine, ROOT, "unused", 0, 0)
    built = project.images()
    for image, arguments in built.items():
        engine.build(image, ROOT, arguments)
        print(f"{image}: {engine.inspect(image)['Size'] / 1e6:.0f} MB")
    return built


@pytest.fixture(scope="module")
async def project(engine: Engine, images: dict[str, dict[str, str]]) -> AsyncIterator[ComposeProject]:
    assert images
    made = ComposeProject(engine, ROOT, f"penstock-test-{os.getpid()}", free_port(), free_port())
    try:
        made.compose("up", "-d")
        await until_ready(made)
        yield made
    finally:
        made.down()
        assert made.containers() == []


@pytest.fixture
async def client(project: ComposeProject) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"127.0.0.1:{project.grpc_port}", timeout_s=START_S) as made:
        yield made


@pytest.fixture(autouse=True)
def _logs_of_a_failure(request: pytest.FixtureRequest) -> Iterator[None]:
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed and "project" in request.fixturenames:
        print(request.getfixturevalue("project").logs())


async def until(condition: Callable[[], bool], timeout_s: float = START_S) -> None:
    """Wait until it holds; asked in a thread, for it runs commands."""
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.5)


async def until_ready(project: ComposeProject) -> None:
    """Wait until the router answers requests through its published port, and every tier has a worker."""
    url = f"http://127.0.0.1:{project.http_port}/readyz"
    async with aiohttp.ClientSession() as session, asyncio.timeout(START_S):
        while True:
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        break
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)
    tiers = ("small", "medium", "large")
    await until(lambda: all(project.instances("worker", tier) for tier in tiers) and bool(project.instances("judge")))


# Long enough that some replies run in every worker whenever its container is killed.
LONG: Any = {"temperature": 0, "max_tokens": 300, "ignore_eos": True}


def prompts() -> list[str]:
    return [f"What is {a} + {3 * a + 1}?" for a in range(11, 11 + STREAMS)]


class Reader:
    """A client that asks one prompt again and again; every token of every reply must come once."""

    def __init__(self, client: AsyncClient, prompt: str, model: str) -> None:
        self._client, self._prompt, self._model = client, prompt, model
        self.replies, self.instance_changes = 0, 0
        self.instance_id = ""  # that computes the reply

    async def once(self) -> str:
        text, tokens = "", 0
        async for event in self._client.stream(self._prompt, model=self._model, **LONG):
            if isinstance(event, Tokens):
                assert event.offset == tokens, "a token twice, or one missing"
                tokens += len(event.token_ids)
                text += event.text
            if isinstance(event, TierStarted):
                self.instance_id = event.instance_id
            if isinstance(event, InstanceChanged):
                self.instance_id = event.to_instance_id
                self.instance_changes += 1
        self.replies += 1
        return text

    async def until(self, over: asyncio.Event) -> set[str]:
        """The texts that came until then, and of one reply more."""
        texts = set()
        while not over.is_set():
            texts.add(await self.once())
        return texts | {await self.once()}


async def check_streams(client: AsyncClient, model: str, disturb: Callable[[list[Reader]], object]) -> list[Reader]:
    """50 streams at a time, before, while and after `disturb` runs: every reply has the text that it has undisturbed.

    disturb: called with the readers.
    """
    readers = [Reader(client, prompt, model) for prompt in prompts()]
    expected = await asyncio.gather(*(reader.once() for reader in readers))
    over = asyncio.Event()
    reading = [asyncio.create_task(reader.until(over)) for reader in readers]
    try:
        await asyncio.wait_for(until(lambda: all(reader.replies >= 2 for reader in readers)), START_S)
        await asyncio.to_thread(disturb, readers)
    finally:
        over.set()
        texts = await asyncio.gather(*reading)
    assert texts == [{text} for text in expected]
    return readers


def test_an_edit_of_the_source_keeps_the_layers_of_the_dependencies(
    engine: Engine, images: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in (*files, "scripts/requirements.py"):
        if (ROOT / name).is_file() and not name.startswith(UNUSED):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    with (tmp_path / "services" / "__init__.py").open("a") as source:
        source.write("# edited\n")
    with (tmp_path / "pyproject.toml").open("a") as settings:
        settings.write("# edited\n")
    (image, arguments), *_ = ((name, args) for name, args in images.items() if "gateway" in args["EXTRAS"])
    engine.build("penstock-mesh-edited", tmp_path, arguments)
    try:
        before, after = (engine.inspect(name)["RootFS"]["Layers"] for name in (image, "penstock-mesh-edited"))
        assert len(before) == len(after)
        assert before != after
        assert before[:-AFTER_SOURCE] == after[:-AFTER_SOURCE]
    finally:
        run(engine.name, "image", "rm", "--force", "penstock-mesh-edited")


def test_only_the_worker_image_holds_torch(engine: Engine, images: dict[str, dict[str, str]]) -> None:
    check = "import importlib.util as u; print(u.find_spec('torch') is not None)"
    for image, arguments in images.items():
        printed = run(engine.name, "run", "--rm", "--entrypoint", "python", image, "-c", check).strip()
        assert printed == str("worker" in arguments["EXTRAS"]), image


async def test_no_service_compiles_kernels_at_its_start(project: ComposeProject) -> None:
    """The image holds those that its services run."""
    logs = await asyncio.to_thread(project.logs, "all")
    assert "listens on" in logs
    assert "compiling" not in logs


async def test_a_request_climbs_the_cascade_through_the_published_ports(
    project: ComposeProject, client: AsyncClient
) -> None:
    reply = await client.generate("What is 12 + 30?", temperature=0)
    assert "42" in reply.text
    body = {"model": "large", "messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
    url = f"http://127.0.0.1:{project.http_port}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert response.status == 200
        assert "42" in (await response.json())["choices"][0]["message"]["content"]
    # a prompt outside what the family knows: the judge rejects, and a larger tier answers
    climbed = await client.generate("zqx 77 ~ 3 ??", temperature=0, max_tokens=40)
    assert climbed.tier != "small"


async def test_a_tier_scales_and_loses_a_container_without_losing_a_reply(
    engine: Engine, project: ComposeProject, client: AsyncClient
) -> None:
    """A container is killed under 50 streams: no token is lost, none comes twice, every text is the same."""
    project.compose("up", "-d", "--scale", "worker-small=3")
    await until(lambda: len(project.instances("worker", "small")) == 3)
    assert len(project.containers("worker-small")) == 3
    killed: list[str] = []

    def kill(readers: list[Reader]) -> None:
        """Kill the container that computes most replies, by the id in its instance's name."""
        ((instance_id, _),) = Counter(reader.instance_id for reader in readers).most_common(1)
        killed.append(instance_id.removeprefix("worker-small-").rpartition("-")[0])
        run(engine.name, "kill", killed[0])

    readers = await check_streams(client, "small", kill)
    assert sum(reader.instance_changes for reader in readers) > 0, "the container computed no reply"
    await until(lambda: len(project.instances("worker", "small")) == 2)
    run(engine.name, "start", killed[0])
    await until(lambda: len(project.instances("worker", "small")) == 3)


async def test_redis_restarts_under_streams(engine: Engine, project: ComposeProject, client: AsyncClient) -> None:
    (redis,) = project.containers("redis")
    await check_streams(client, "small", lambda _: run(engine.name, "restart", redis))
    await until_ready(project)
    assert "42" in (await client.generate("What is 12 + 30?", temperature=0)).text


async def test_the_router_restarts_and_clients_keep_their_replies(
    engine: Engine, project: ComposeProject, client: AsyncClient
) -> None:
    """The router drains; the SDK takes every reply up where it was, at the router that comes back."""
    (router,) = project.containers("router")
    await check_streams(client, "small", lambda _: run(engine.name, "restart", "-t", "35", router))
    await until_ready(project)
    assert "42" in (await client.generate("What is 12 + 30?", temperature=0)).text
