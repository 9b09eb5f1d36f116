"""One trace per request over all services, metrics in Prometheus' format, logs with trace ids."""

import asyncio
import json
import logging
import re
import urllib.request
from collections.abc import AsyncIterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from penstock import NotFoundError, Span, Trace
from penstock.services import telemetry
from penstock.services.settings import ServiceSettings
from penstock.services.telemetry import set_up_logging
from tests.conftest import MeshFileMaker
from tests.support.mesh import TestMesh, running_mesh
from tests.support.otlp import otlp_collector
from tests.support.services import RedisProcess


@pytest.fixture
async def mesh(redis: RedisProcess, mesh_file: MeshFileMaker) -> AsyncIterator[TestMesh]:
    tiers = [{"name": "small", "model": "s", "threshold": 95}, {"name": "large", "model": "l"}]
    async with running_mesh(mesh_file(tiers), redis.url) as running:
        yield running


async def trace_of(mesh: TestMesh, trace_id: str, spans: int) -> Trace:
    """The trace, as soon as so many of its spans have arrived."""
    async with mesh.client() as client, asyncio.timeout(60):
        while True:
            try:
                (found,) = await client.traces(trace_id=trace_id)
                if len(found.spans) >= spans:
                    return found
            except NotFoundError:
                pass
            await asyncio.sleep(0.1)


async def test_one_request_is_one_trace_over_all_services(mesh: TestMesh) -> None:
    async with mesh.client() as client:
        reply = await client.generate("hello", temperature=0)
        assert [t.tier for t in reply.tiers] == ["small", "large"]
        found = await trace_of(mesh, reply.trace_id, 9)
        assert reply.trace_id in {trace.trace_id for trace in await client.traces(5)}
    by_id = {span.span_id: span for span in found.spans}
    (root,) = [span for span in found.spans if not span.parent_span_id]
    assert root.name == "penstock.router.v1.RouterService/Generate"
    assert root.service == "router"

    def chain(name: str, service: str) -> list[str]:
        """Names from a span up to the root."""
        span: Span | None = next(s for s in found.spans if s.name == name and s.service == service)
        names = []
        while span is not None:
            names.append(span.name)
            span = by_id.get(span.parent_span_id)
        return names

    generate, score = "penstock.worker.v1.WorkerService/Generate", "penstock.judge.v1.JudgeService/Score"
    assert chain(generate, "worker") == [generate, generate, "tier small", root.name]
    assert chain(score, "judge") == [score, score, "tier small", root.name]
    assert [s.name for s in found.spans if s.name.startswith("tier ")] == ["tier small", "tier large"]
    worker = next(s for s in found.spans if s.service == "worker")
    assert worker.attributes["gen_ai.usage.output_tokens"] == str(reply.tiers[0].usage.output_tokens)
    assert worker.attributes["rpc.system"] == "grpc"
    small = next(s for s in found.spans if s.name == "tier small")
    assert small.attributes["penstock.accepted"] == "False"
    assert float(small.attributes["penstock.score"]) == pytest.approx(90, abs=1)
    assert not any(span.failed for span in found.spans)


async def test_a_refused_request_leaves_a_trace_too(mesh: TestMesh) -> None:
    from penstock import InvalidRequestError

    async with mesh.client() as client:
        with pytest.raises(InvalidRequestError):
            await client.generate("hello", temperature=9)
        async with asyncio.timeout(60):
            while not (found := await client.traces(1)):
                await asyncio.sleep(0.1)
    (span,) = found[0].spans
    assert span.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert span.attributes["error.type"] == "INVALID_REQUEST"


async def test_metrics_are_there_for_prometheus(mesh: TestMesh) -> None:
    async with mesh.client() as client:
        await asyncio.gather(*(client.generate(f"p{i}") for i in range(4)))

    def scrape(name: str) -> str:
        address = mesh.parts[name].telemetry.metrics_address
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    router = await asyncio.to_thread(scrape, "router-0")
    worker = await asyncio.to_thread(scrape, "worker-small-0")
    judge = await asyncio.to_thread(scrape, "judge-0")
    assert re.search(r'penstock_router_requests_total\{.*gen_ai_request_model="cascade"', router)
    assert "penstock_router_escalations_total{" in router
    assert "gen_ai_server_time_to_first_token_seconds_bucket{" in router
    assert "gen_ai_server_time_per_output_token_seconds_count{" in worker
    assert re.search(r'penstock_worker_kv_blocks_free\S*\{.*penstock_tier="small"', worker)
    assert "penstock_worker_steps_total{" in worker
    assert "rpc_server_duration_seconds_bucket{" in worker
    assert "penstock_judge_score" in judge


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_logs_carry_the_trace_id(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        set_up_logging("router", ServiceSettings.load(log_format=log_format, log_level="info"))
        with TracerProvider().get_tracer("t").start_as_current_span("s") as span:
            logging.getLogger("x").info("hello %s", "you")
            trace_id = f"{span.get_span_context().trace_id:032x}"
        logging.getLogger("x").debug("not told")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    line = capsys.readouterr().err.strip()
    assert "not told" not in line
    if log_format == "json":
        data = json.loads(line)
        assert (data["message"], data["trace_id"], data["service"]) == ("hello you", trace_id, "router")
    else:
        assert "hello you" in line
        assert f"trace={trace_id}" in line


async def test_spans_reach_any_otlp_collector(
    redis: RedisProcess, mesh_file: MeshFileMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real OTLP receiver, as a collector has it."""
    with otlp_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{collector.address}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "true")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        async with running_mesh(mesh_file(), redis.url) as mesh, mesh.client() as client, asyncio.timeout(60):
            reply = await client.generate("hello", trace=True)
            await collector.of_trace(reply.trace_id, {"penstock-router", "penstock-worker", "penstock-judge"})


def test_attribute_values_of_spans_are_truncated() -> None:
    """Errors quote peers and clients; a trace of such a text costs no more than the limit."""
    measured = telemetry.disabled()
    span = measured.tracer.start_span("s")
    span.set_attribute("error", "x" * 10 * telemetry.MAX_ATTRIBUTE_CHARS)
    assert isinstance(span, ReadableSpan)
    assert span.attributes is not None
    assert span.attributes["error"] == "x" * telemetry.MAX_ATTRIBUTE_CHARS
    measured.close()
