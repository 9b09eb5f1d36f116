"""What surrounds the calls of both clients: load balancing, metadata of a call and of its context, interceptors."""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from grpc import aio

from penstock import AsyncClient, Client, Options, RetryPolicy
from penstock.client.resumable import PROBE_TURNS, Routers
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.services.grpc_types import Context
from penstock.services.processes import free_port
from tests.support.router_servicers import Step, answer, scripted

QUICK = RetryPolicy(initial_backoff_s=0.001, max_backoff_s=0.01)
team: contextvars.ContextVar[str] = contextvars.ContextVar("team", default="none")

Ask = Callable[[str | Sequence[str], Sequence[Options], dict[str, Any]], Awaitable[None]]


async def ask_async(target: str | Sequence[str], requests: Sequence[Options], options: dict[str, Any]) -> None:
    async with AsyncClient(target, retry=QUICK, **options) as client:
        for request in requests:
            await client.generate("hello", request)


async def ask_blocking(target: str | Sequence[str], requests: Sequence[Options], options: dict[str, Any]) -> None:
    def use() -> None:
        with Client(target, retry=QUICK, **options) as client:
            for request in requests:
                client.generate("hello", request)

    await asyncio.to_thread(use)


@pytest.fixture(params=[ask_async, ask_blocking], ids=["asyncio", "blocking"])
def ask(request: pytest.FixtureRequest) -> Ask:
    function: Ask = request.param
    return function


def noting(seen: list[dict[str, str]]) -> Step:
    """Answer, and note the metadata of the call."""

    async def step(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        seen.append({key: str(value) for key, value in context.invocation_metadata() or ()})
        async for response in answer(request, context):
            yield response

    return step


@pytest.mark.parametrize(("balancing", "counts"), [("pick_first", [9, 0, 0]), ("round_robin", [3, 3, 3])])
async def test_requests_go_to_one_router_or_to_all_in_turn(ask: Ask, balancing: str, counts: list[int]) -> None:
    async with AsyncExitStack() as stack:
        routers = [await stack.enter_async_context(scripted(answer)) for _ in range(3)]
        addresses = [router.address for router in routers]
        await ask(addresses, [Options()] * 9, {"load_balancing": balancing})
        assert [len(router.requests) for router in routers] == counts


async def test_a_router_that_is_gone_costs_no_request(ask: Ask) -> None:
    """It is left out after the first request that finds out; the other ones are spread over the rest."""
    async with scripted(answer) as first, scripted(answer) as second:
        addresses = [first.address, f"127.0.0.1:{free_port()}", second.address]
        await ask(addresses, [Options()] * 12, {"load_balancing": "round_robin"})
        counts = sorted(len(router.requests) for router in (first, second))
        assert sum(counts) == 12
        assert counts[0] >= 4


def test_a_router_that_failed_is_tried_again_now_and_then_until_it_answers() -> None:
    routers = Routers(2, round_robin=True)
    routers.failed(1)
    turns = [routers.first() for _ in range(4 * PROBE_TURNS)]
    assert 1 <= turns.count(1) <= 4
    routers.answered(1)
    turns = [routers.first() for _ in range(10)]
    assert turns.count(1) == 5
    routers.failed(0)
    routers.failed(1)
    assert {routers.first() for _ in range(10)} <= {0, 1}, "where all have failed, one is tried"


async def test_metadata_of_a_call_comes_over_those_of_the_context_and_of_the_client(ask: Ask) -> None:
    seen = list[dict[str, str]]()

    def context() -> Mapping[str, str]:
        return {"x-team": team.get(), "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}

    options = {"metadata": {"x-team": "client", "x-own": "client"}, "api_key": "key", "context_metadata": context}
    token = team.set("context")
    async with scripted(noting(seen)) as router:
        requests = [Options(), Options(metadata={"x-team": "call"}), Options(trace=True)]
        await ask(router.address, requests, options)
    team.reset(token)
    assert [call["x-team"] for call in seen] == ["context", "call", "context"]
    assert all(call["x-own"] == "client" and call["authorization"] == "Bearer key" for call in seen)
    assert {call["traceparent"][3:35] for call in seen} == {"a" * 32}, "the caller's trace, not one of the SDK's own"


class CountingAsync(aio.UnaryStreamClientInterceptor):
    def __init__(self) -> None:
        self.methods = list[str]()

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        self.methods.append(str(client_call_details.method))
        return await continuation(client_call_details, request)


class CountingBlocking(grpc.UnaryStreamClientInterceptor):
    def __init__(self) -> None:
        self.methods = list[str]()

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        self.methods.append(str(client_call_details.method))
        return continuation(client_call_details, request)


async def test_interceptors_see_the_calls(ask: Ask) -> None:
    counting = CountingAsync() if ask is ask_async else CountingBlocking()
    async with scripted(answer) as router:
        await ask(router.address, [Options()] * 2, {"interceptors": [counting]})
    methods = [method.removeprefix("b'").removesuffix("'") for method in counting.methods]
    assert methods == ["/penstock.router.v1.RouterService/Generate"] * 2
