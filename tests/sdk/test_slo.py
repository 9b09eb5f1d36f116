"""SLOs in the SDK and the CLI: what is sent, what a retry sends, what is shown."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from typer.testing import CliRunner, Result

from penstock import AsyncClient, RetryPolicy, Slo
from penstock.cli.main import app
from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.services.domain.errors import Unavailable
from penstock.services.grpc_types import Context
from tests.support.router_servicers import accepted, answer, failing, scripted


async def declined(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
    yield accepted()
    yield pb.GenerateResponse(tier_declined=pb.TierDeclined(tier="large", instance_id="w-1", reason="no room"))
    result = pb.SloResult(slo_class=common_pb2.SLO_CLASS_UNSPECIFIED)
    finished = pb.Finished(tier="large", reason=common_pb2.FINISH_REASON_DECLINED, slo=result)
    yield pb.GenerateResponse(finished=finished)


async def invoked(*arguments: str) -> Result:
    return await asyncio.to_thread(lambda: CliRunner(env={"COLUMNS": "200"}).invoke(app, ["ask", *arguments]))


async def test_a_retry_sends_only_what_is_left_of_the_budget() -> None:
    async with scripted(failing(Unavailable("down")), failing(Unavailable("down")), answer) as router:
        async with AsyncClient(router.address, retry=RetryPolicy(initial_backoff_s=0.01), timeout_s=60) as client:
            await client.generate("hello", slo=Slo(30.0, time_per_output_token_s=1.0))
        times_s = [r.slo.time_to_first_token.ToNanoseconds() / 1e9 for r in router.requests]
        assert times_s[0] == 30.0
        assert 30.0 > times_s[1] > times_s[2] > 0


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
        result = await invoked("-q", "-t", router.address, *options, "hello")
        assert result.exit_code == 0, result.output
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
    result = await invoked("-t", "127.0.0.1:1", *options, "hello")
    assert result.exit_code == 2
    assert message in result.output


async def test_ask_says_that_a_request_was_declined() -> None:
    async with scripted(declined) as router:
        result = await invoked("-t", router.address, "--ttft", "1ms", "--decline", "hello")
    assert result.exit_code == 0
    assert "large: declined by w-1: no room" in result.stdout
    assert "no worker can keep the latency objectives" in result.stdout
