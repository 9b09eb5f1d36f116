"""Which requests leave a trace, and what is in it."""

import aiohttp
import pytest

from penstock import NotFoundError, Trace, UnavailableError
from penstock.services.state.traces import SpanRecord, TraceStore
from tests.conftest import MeshRunner
from tests.support.measured import trace_with
from tests.support.mesh import TestMesh
from tests.support.waiting import until_answered

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVICES = {"router", "worker", "judge"}


@pytest.fixture
def tracing_mesh(run_mesh: MeshRunner) -> MeshRunner:
    """A mesh with these settings of the router."""
    return lambda tiers=None, **router: run_mesh(tiers, router=router)


async def trace_of(mesh: TestMesh, trace_id: str, services: set[str]) -> Trace:
    """The trace, as soon as these services and the root are in it."""

    def is_complete(found: Trace) -> bool:
        roots = [span for span in found.spans if span.name.startswith(("penstock.router", "POST", "request"))]
        return services <= {span.service for span in found.spans} and bool(roots)

    async with mesh.client() as client:
        return await trace_with(client, trace_id, is_complete)


async def kept(mesh: TestMesh) -> list[list[SpanRecord]]:
    """All traces that are in Redis, one that a request asks for now included: what was sent before it is there."""
    async with mesh.client() as client:
        reply = await client.generate("the last one", temperature=0, trace=True)
    await trace_of(mesh, reply.trace_id, SERVICES)
    return await TraceStore(mesh.router.redis, mesh.router.keys).last(100)


async def test_without_share_or_rate_nothing_is_traced_asked_for_or_not(tracing_mesh: MeshRunner) -> None:
    """Nor do the worker and the judge begin traces of their own."""
    async with tracing_mesh(trace_share=0, trace_per_s=0) as mesh, mesh.client() as client:
        for asks in (False, True, True):
            reply = await client.generate("hello", temperature=0, trace=asks)
            assert reply.trace_id == ""
        for part in mesh.parts.values():
            assert part.telemetry._tracers.force_flush()
        assert await mesh.router.redis.xlen(mesh.router.keys.spans) == 0


async def test_share_one_traces_every_request(tracing_mesh: MeshRunner) -> None:
    async with tracing_mesh(trace_share=1, trace_per_s=0) as mesh, mesh.client() as client:
        replies = [await client.generate(f"q{i}", temperature=0) for i in range(15)]
        assert len({reply.trace_id for reply in replies if reply.trace_id}) == 15
        assert len(await kept(mesh)) == 16


async def test_the_first_requests_are_traced_and_those_that_ask(tracing_mesh: MeshRunner) -> None:
    """One of each kind here: a request that is not traced leaves no span of any service."""
    async with tracing_mesh(trace_share=0, trace_per_s=0.001) as mesh, mesh.client() as client:
        first, second = [await client.generate("hello", temperature=0) for _ in range(2)]
        assert first.trace_id
        assert second.trace_id == ""
        traces = await kept(mesh)
        assert sorted(spans[0].trace_id == first.trace_id for spans in traces) == [False, True]
        assert all({span.service for span in spans} >= SERVICES for spans in traces)
        assert (await client.generate("hello", temperature=0, trace=True)).trace_id == "", "another asked before"


async def test_http_requests_ask_by_traceparent(tracing_mesh: MeshRunner) -> None:
    body = {"model": "cascade", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}

    async def trace_id(session: aiohttp.ClientSession, flags: str) -> str:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-{flags}"}
        async with session.post(f"{mesh.http}/v1/chat/completions", json=body, headers=headers) as response:
            return str((await response.json())["penstock"]["trace_id"])

    async with tracing_mesh(trace_share=0, trace_per_s=0.001) as mesh, aiohttp.ClientSession() as session:
        assert await trace_id(session, "00") == ""
        assert await trace_id(session, "01") == TRACE
        root = (await trace_of(mesh, TRACE, SERVICES)).spans[0]
        assert (root.name, root.parent_span_id) == ("POST /v1/chat/completions", SPAN)
        assert await trace_id(session, "01") == ""


async def test_an_untraced_request_that_fails_gets_a_trace_at_its_end(tracing_mesh: MeshRunner) -> None:
    """With what the router knows: its model and id, which tiers it was at and when, and why it failed."""
    tiers = [{"name": "small", "model": "s", "threshold": 95}, {"name": "large", "model": "l", "workers": 0}]
    settings = {"trace_share": 0, "trace_per_s": 0.001, "tier_wait_s": 0.05}
    async with tracing_mesh(tiers, **settings) as mesh, mesh.client() as client:
        asked = await client.generate("hello", model="small", temperature=0)  # takes the room of those that do not ask
        for request_id in ("first", "second"):
            with pytest.raises(UnavailableError):
                await client.generate("hello", temperature=0, request_id=request_id)

        async def late() -> list[Trace]:
            return [trace for trace in await client.traces(10) if trace.trace_id != asked.trace_id]

        ((root, *rest),) = [trace.spans for trace in await until_answered(late)]
    assert (root.name, root.service, root.failed) == ("request", "router", True)
    assert root.attributes["penstock.trace.reason"] == "failed"
    assert root.attributes["penstock.request_id"] == "first"
    assert root.attributes["error.type"] == "UNAVAILABLE"
    assert [(span.name, span.failed, span.parent_span_id) for span in rest] == [
        ("tier small", False, root.span_id),
        ("tier large", True, root.span_id),
    ]
    small = rest[0]
    assert float(small.attributes["penstock.score"]) < float(small.attributes["penstock.threshold"]) == 95
    assert root.start_s <= small.start_s <= small.start_s + small.duration_s <= rest[1].start_s
    assert rest[1].start_s + rest[1].duration_s <= root.start_s + root.duration_s


async def test_an_untraced_request_that_is_slow_gets_a_trace_at_its_end(tracing_mesh: MeshRunner) -> None:
    """Its id is in the reply, as if it had been traced from the start. What a client has to mend leaves none."""
    async with (
        tracing_mesh(trace_share=0, trace_per_s=0.001, trace_slow_s=0.0001) as mesh,
        mesh.client() as client,
    ):
        traced, slow = [await client.generate("hello", temperature=0) for _ in range(2)]
        with pytest.raises(NotFoundError):
            await client.generate("hello", model="nobody")
        found = await trace_of(mesh, slow.trace_id, {"router"})
        assert traced.trace_id != slow.trace_id
    root, *rest = found.spans
    assert root.attributes["penstock.trace.reason"] == "slow"
    assert root.duration_s == pytest.approx(slow.total_s, abs=1.0)
    assert [span.name for span in rest] == ["tier small"]
    assert not any(span.failed for span in found.spans)
