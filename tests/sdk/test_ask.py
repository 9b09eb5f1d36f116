"""`penstock ask`: its options for latencies, and a mesh that is full, declines, or gives an empty answer."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.services.domain.errors import Overloaded
from penstock.services.grpc_types import Context
from tests.support.cli import Ended, penstock
from tests.support.router_servicers import TEXT, accepted, answer, failing, scripted

TRACE_ID = "0123456789abcdef" * 2


async def ask(*arguments: str, columns: int = 200) -> Ended:
    return await asyncio.to_thread(penstock, "ask", *arguments, columns=columns)


async def test_a_full_mesh_is_waited_for() -> None:
    async with scripted(*[failing(Overloaded("512 requests are waiting already", 0.2))] * 3, answer) as router:
        done = await ask("-q", "-t", router.address, "hello")
        assert (done.returncode, done.stdout.strip()) == (0, TEXT)
        assert len(router.requests) == 4


async def no_text(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
    yield accepted()
    finished = pb.Finished(
        tier="a-tier-with-a-rather-long-name", reason=common_pb2.FINISH_REASON_STOP, trace_id=TRACE_ID
    )
    yield pb.GenerateResponse(finished=finished)


async def test_an_empty_answer_is_named_and_the_trace_id_is_not_wrapped() -> None:
    async with scripted(no_text) as router:
        result = await ask("-t", router.address, "hello", columns=60)
    lines = result.stdout.splitlines()
    assert lines[-2].strip() == "(the answer is empty)"
    assert lines[-1].endswith(f"trace {TRACE_ID}")


async def declined(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
    yield accepted()
    yield pb.GenerateResponse(tier_declined=pb.TierDeclined(tier="large", instance_id="w-1", reason="no room"))
    result = pb.SloResult(slo_class=common_pb2.SLO_CLASS_UNSPECIFIED)
    finished = pb.Finished(tier="large", reason=common_pb2.FINISH_REASON_DECLINED, slo=result)
    yield pb.GenerateResponse(finished=finished)


@pytest.mark.parametrize(
    ("options", "ttft_ms", "tpot_ms", "name", "fallback"),
    [
        (["--ttft", "2s", "--tpot", "50ms"], 2000, 50, "", 0),
        (["--ttft", "0.5"], 500, None, "", 0),
        (["--tpot", "50ms", "--decline"], None, 50, "", common_pb2.SLO_FALLBACK_DECLINE),
        (["--slo", "interactive"], None, None, "interactive", 0),
    ],
)
async def test_ask_sends_its_options(
    options: list[str], ttft_ms: int | None, tpot_ms: int | None, name: str, fallback: int
) -> None:
    async with scripted(answer) as router:
        result = await ask("-q", "-t", router.address, *options, "hello")
        assert result.returncode == 0, result.output
        (request,) = router.requests
    slo = request.slo
    assert slo.HasField("time_to_first_token") is (ttft_ms is not None)
    if ttft_ms is not None:
        assert slo.time_to_first_token.ToMilliseconds() == ttft_ms
    assert [p.time_per_output_token.ToMilliseconds() for p in slo.phases] == ([] if tpot_ms is None else [tpot_ms])
    assert (slo.name, slo.fallback) == (name, fallback)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ttft", "soon"], "--ttft"),
        (["--ttft", "0s"], "--ttft"),
        (["--tpot", "-5ms"], "--tpot"),
        (["--slo", "interactive", "--ttft", "2s"], "--slo"),
        (["--decline"], "--decline"),
    ],
    ids=" ".join,
)
async def test_ask_refuses_bad_options_by_name(options: list[str], message: str) -> None:
    result = await ask("-t", "127.0.0.1:1", *options, "hello")
    assert result.returncode == 2
    assert message in result.output


async def test_ask_says_that_a_request_was_declined() -> None:
    async with scripted(declined) as router:
        result = await ask("-t", router.address, "--ttft", "1ms", "--decline", "hello")
    assert result.returncode == 0
    assert "large: declined by w-1: no room" in result.stdout
    assert "no worker can keep the latency objectives" in result.stdout
