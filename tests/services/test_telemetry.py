"""One trace per request over all services, metrics in Prometheus' format, logs with trace ids."""

import asyncio
import json
import logging
import re

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from penstock import InvalidRequestError, Span, Trace
from penstock.services import telemetry
from penstock.services.settings import ServiceSettings
from penstock.services.telemetry import set_up_logging
from tests.conftest import MeshRunner
from tests.support.measured import trace_with
from tests.support.mesh import TestMesh
from tests.support.otlp import otlp_collector
from tests.support.telemetry_off import telemetry_off
from tests.support.waiting import until_answered

MESH = {"tiers": [{"name": "small", "model": "s", "threshold": 95}, {"name": "large", "model": "l"}]}


async def test_one_request_is_one_trace_over_all_services(mesh: TestMesh) -> None:
    async with mesh.client() as client:
        reply = await client.generate("hello", temperature=0)
        assert [t.tier for t in reply.tiers] == ["small", "large"]
        found = await trace_with(client, reply.trace_id, lambda trace: len(trace.spans) >= 9)
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
    async with mesh.client() as client:
        with pytest.raises(InvalidRequestError):
            await client.generate("hello", temperature=9)

        async def refused() -> list[Trace]:
            return [trace for trace in await client.traces(9) if "error.type" in trace.spans[0].attributes]

        ((span,),) = [trace.spans for trace in await until_answered(refused)]
    assert span.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert span.attributes["error.type"] == "INVALID_REQUEST"


async def test_metrics_are_there_for_prometheus(mesh: TestMesh) -> None:
    async with mesh.client() as client:
        await asyncio.gather(*(client.generate(f"p{i}") for i in range(4)))
    router, worker, judge = [await mesh.metrics(name) for name in ("router-0", "worker-small-0", "judge-0")]
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


async def test_spans_reach_any_otlp_collector(run_mesh: MeshRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real OTLP receiver, as a collector has it."""
    with otlp_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{collector.address}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "true")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        async with run_mesh() as mesh, mesh.client() as client, asyncio.timeout(60):
            reply = await client.generate("hello", trace=True)
            await collector.of_trace(reply.trace_id, {"penstock-router", "penstock-worker", "penstock-judge"})


def test_attribute_values_of_spans_are_truncated() -> None:
    """Errors quote peers and clients; a trace of such a text costs no more than the limit."""
    measured = telemetry_off()
    span = measured.tracer.start_span("s")
    span.set_attribute("error", "x" * 10 * telemetry.MAX_ATTRIBUTE_CHARS)
    assert isinstance(span, ReadableSpan)
    assert span.attributes is not None
    assert span.attributes["error"] == "x" * telemetry.MAX_ATTRIBUTE_CHARS
    measured.close()
