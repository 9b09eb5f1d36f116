"""What a clumsy or hostile client sends is refused by itself: real services and Redis, simulated engines, two routers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status

from penstock import OverloadedError, TierStarted, Tokens
from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc
from penstock.proto.worker.v1 import worker_pb2, worker_pb2_grpc
from penstock.router_service.generation.attempt import attempt_id
from penstock.router_service.generation.live_requests import LiveRequests
from penstock.services.channels import MAX_CLIENT_MESSAGE_BYTES
from penstock.services.domain.errors import AlreadyRunning
from penstock.services.domain.instances import Role
from penstock.types.requests import MAX_REQUEST_ID_CHARS
from tests.conftest import MeshRunner
from tests.support.mesh import TestMesh
from tests.support.present import present

DUPLICATES = 20
SLOW = {"overhead_ms": 5.0, "reply_tokens": 100_000}


@pytest.fixture
async def mesh(run_mesh: MeshRunner) -> AsyncIterator[TestMesh]:
    tiers = [
        {"name": "small", "model": "sim-s", "threshold": 1, "workers": 1, "simulated": SLOW},
        {"name": "large", "model": "sim-l", "workers": 1, "simulated": SLOW},
    ]
    async with run_mesh(tiers, routers=2) as running:
        yield running


def asked(request_id: str, tokens: int = 2000, **more: object) -> pb.GenerateRequest:
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, seed=1)
    prompt = common_pb2.Prompt(text="hello")
    fields: dict[str, object] = {"model": "large", "prompt": prompt, "sampling": sampling, "request_id": request_id}
    return pb.GenerateRequest(**(fields | more))  # type: ignore[arg-type]


class Call:
    """One Generate call, read as far as the test needs."""

    def __init__(self, channel: aio.Channel, request: pb.GenerateRequest) -> None:
        self._call = router_pb2_grpc.RouterServiceStub(channel).Generate(request, timeout=60)
        self.token_ids: list[int] = []
        self.offset: int | None = None

    async def until_tokens(self, count: int) -> None:
        while len(self.token_ids) < count:
            response = await self._call.read()
            assert isinstance(response, pb.GenerateResponse), "the reply has ended"
            if response.HasField("tokens"):
                if self.offset is None:
                    self.offset = response.tokens.frame.offset
                self.token_ids += response.tokens.frame.token_ids

    async def refusal(self) -> aio.AioRpcError:
        """The error that the call ends with."""
        try:
            while isinstance(await self._call.read(), pb.GenerateResponse):
                pass
        except aio.AioRpcError as error:
            return error
        raise AssertionError("the reply ended well")

    def cancel(self) -> None:
        self._call.cancel()


@asynccontextmanager
async def channel_to(mesh: TestMesh, router: str) -> AsyncIterator[aio.Channel]:
    async with aio.insecure_channel(mesh.parts[router].address) as channel:
        yield channel


async def test_a_duplicate_of_a_live_request_is_refused_at_once_and_costs_nobody_anything(mesh: TestMesh) -> None:
    """In a cascade too: nothing is tried, nobody is ejected, nothing escalates; once the first has ended the id is free."""
    async with channel_to(mesh, "router-0") as channel:
        first = Call(channel, asked("same"))
        await first.until_tokens(1)
        for model in ("large", "cascade"):
            duplicates = [Call(channel, asked("same", model=model)) for _ in range(DUPLICATES)]
            for error in await asyncio.gather(*(call.refusal() for call in duplicates)):
                assert error.code() is grpc.StatusCode.ALREADY_EXISTS
                assert reason(error) == "ALREADY_RUNNING"
        await first.until_tokens(20)
        async with mesh.client() as client:
            status = await client.status()
        assert {i.state for i in status.instances} == {"ready"}
        assert status.failovers == 0
        assert sum(tier.escalated for tier in status.tiers) == 0
        first.cancel()
        await mesh.until(lambda s: s.active == 0)
        again = Call(channel, asked("same", tokens=4))
        await again.until_tokens(4)


def details(error: aio.AioRpcError) -> Any:
    """What is packed into the status of a call."""
    return present(rpc_status.from_call(error)).details  # type: ignore[arg-type]


def reason(error: aio.AioRpcError) -> str:
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in details(error))
    return str(info.reason)


@pytest.mark.parametrize("router", ["router-0", "router-1"])
async def test_a_client_that_takes_its_request_up_again_gets_the_rest_while_the_first_call_still_runs(
    mesh: TestMesh, router: str
) -> None:
    """A stuck router does not know that its client has gone; nor does one whose client's connection is half open."""
    async with channel_to(mesh, "router-0") as stuck, channel_to(mesh, router) as other:
        first = Call(stuck, asked("mine"))
        await first.until_tokens(10)
        got = first.token_ids[:10]
        second = Call(other, asked("mine", resume=pb.Resume(tier="large", token_ids=got)))
        await second.until_tokens(30)
        assert second.offset == 10
        await first.until_tokens(40)
        assert first.token_ids[:40] == got + second.token_ids[:30], "both have the same reply"
        first.cancel()
        await second.until_tokens(40)
        second.cancel()


async def test_the_largest_request_that_a_router_takes_breaks_nothing_that_others_share(mesh: TestMesh) -> None:
    """Around the limit each request fails alone; the streams beside it go on, and nobody is ejected."""
    async with mesh.client() as client:
        beside = client.stream("hello", model="large", temperature=0, max_tokens=4000)
        tokens = 0
        async for event in beside:
            if isinstance(event, Tokens):
                break
        async with channel_to(mesh, "router-0") as channel:
            overhead = len(asked("r", prompt=common_pb2.Prompt(text="x" * 2**22)).SerializeToString()) - 2**22
            codes = []
            for size in (MAX_CLIENT_MESSAGE_BYTES - 1, MAX_CLIENT_MESSAGE_BYTES, MAX_CLIENT_MESSAGE_BYTES + 1):
                large = asked("r", prompt=common_pb2.Prompt(text="x" * (size - overhead)))
                assert large.ByteSize() == size
                error = await Call(channel, large).refusal()
                codes.append(error.code())
        assert codes == [grpc.StatusCode.INVALID_ARGUMENT] * 2 + [grpc.StatusCode.RESOURCE_EXHAUSTED]
        async for event in beside:
            tokens += isinstance(event, Tokens)
            if tokens == 20:
                break
        status = await client.status()
        assert {i.state for i in status.instances} == {"ready"}
        assert status.failovers == 0


async def test_a_tier_that_refuses_more_often_than_the_setting_allows_is_told_as_full(run_mesh: MeshRunner) -> None:
    """`router.max_refusals`. The worker's places are taken behind the router's back, so its record still looks idle."""
    slower = SLOW | {"overhead_ms": 50.0}  # 100 s for a reply
    tiers = [{"name": "only", "model": "s", "workers": 0, "max_running": 1, "max_queued": 1, "simulated": slower}]
    async with run_mesh(tiers, router={"max_refusals": 2}) as mesh, mesh.client() as client:
        never = 1e9  # it is at ticks of the clock, and a router that reads of a full worker waits for a place
        await mesh.start(Role.WORKER, "worker", tier="only", publish_interval_s=never, lease_s=300)
        await mesh.until(lambda s: s.tiers[0].live_instances == 1)
        async with aio.insecure_channel(mesh.parts["worker"].address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            taken = [stub.Generate(_worker_request(f"taken {i}"), timeout=60) for i in range(2)]
            while len((load := await stub.GetLoad(worker_pb2.GetLoadRequest())).running_tokens) + len(
                load.queued_tokens
            ) < len(taken):
                await asyncio.sleep(0)
            with pytest.raises(OverloadedError) as caught:
                await client.generate("hello", max_tokens=4)
            assert caught.value.reason == "OVERLOADED"
            assert caught.value.retry_after_s > 0
            assert {i.state for i in (await client.status()).instances} == {"ready"}
            for call in taken:
                call.cancel()
            assert (await client.generate("hello", max_tokens=4)).tier == "only"


def _worker_request(request_id: str) -> worker_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
    prompt = common_pb2.Prompt(text="hello")
    return worker_pb2.GenerateRequest(request_id=request_id, prompt=prompt, sampling=sampling)


async def refused(channel: aio.Channel, message: bytes) -> aio.AioRpcError:
    generate: Any = channel.unary_stream("/penstock.router.v1.RouterService/Generate")
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in generate(message, timeout=60):
            pass
    return caught.value


async def test_a_full_router_refuses_whatever_comes_without_reading_it(run_mesh: MeshRunner) -> None:
    """With a time to wait, and counted; on both protocols. With room the same bytes are refused for what they are."""
    garbage, tiers = b"\xff\xff", [{"name": "large", "model": "l", "simulated": SLOW, "kv_tokens": 100_000}]
    async with (
        run_mesh(tiers, router={"max_active": 1, "max_waiting": 0}) as mesh,
        mesh.client() as client,
        aiohttp.ClientSession() as session,
        aio.insecure_channel(mesh.router.address) as channel,
    ):
        url, before = f"{mesh.http}/v1/chat/completions", (await client.status()).rejected
        headers = {"Content-Type": "application/json"}
        events = client.stream("hello", model="large", temperature=0)
        async for event in events:
            if isinstance(event, TierStarted):
                break
        error: Any = await refused(channel, garbage)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        info = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(info) for detail in details(error))
        assert info.retry_delay.ToMilliseconds() >= 100
        async with session.post(url, data=garbage, headers=headers) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "overloaded"
        after = await client.status()
        assert (after.rejected - before, after.failed) == (2, 0)
        await events.aclose()  # type: ignore[attr-defined]
        await mesh.until(lambda s: s.active == 0)
        assert (await refused(channel, garbage)).code() is grpc.StatusCode.INVALID_ARGUMENT
        async with session.post(url, data=garbage, headers=headers) as response:
            assert response.status == 400


def test_an_id_is_live_until_its_last_call_has_ended() -> None:
    live = LiveRequests()
    with live.entered("a", resumes=False), live.entered("b", resumes=False):
        with live.entered("a", resumes=True), pytest.raises(AlreadyRunning), live.entered("a", resumes=False):
            pass
        with pytest.raises(AlreadyRunning), live.entered("a", resumes=False):
            pass
    with live.entered("a", resumes=True):
        pass
    with live.entered("a", resumes=False):
        pass


@pytest.mark.parametrize("name", ["r", "x" * 200])
def test_every_attempt_has_a_name_of_its_own_that_a_worker_takes(name: str) -> None:
    names = {attempt_id(name) for _ in range(100)}
    assert len(names) == 100
    assert all(len(n) <= MAX_REQUEST_ID_CHARS and n.startswith(name[:100]) for n in names)
