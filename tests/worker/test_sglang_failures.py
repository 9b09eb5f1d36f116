"""Errors of one request at an engine that wraps a server: here a small one of the test's own, without SGLang."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from penstock.services.domain.errors import PromptTooLong, RequestFailed
from penstock.types.replies import FinishReason
from penstock.types.workers import EngineFinished
from penstock.worker_service.engine.held_tokens import OutputCoalescing
from penstock.worker_service.engine.sglang.engine import SglangEngine
from penstock.worker_service.engine.sglang.moves import Running
from penstock.worker_service.engine.sglang.server_link import Silence
from tests.support.engines import answer, request
from tests.support.sglang_stub import LENGTH, Server, attached
from tests.worker.test_long_prompts import HUGE, Tokenizing, all_events, text


@pytest.fixture
async def served() -> AsyncIterator[tuple[SglangEngine, Server]]:
    server = Server()
    async with attached(server) as engine:
        yield engine, server


async def test_text_that_fails_ends_its_request_alone(
    served: tuple[SglangEngine, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is told to stop, the request's place is free, the next one is served."""
    engine, server = served

    class Panic(BaseException):
        """As pyo3's."""

    class Failing:
        def __call__(self, token_id: int) -> str:
            raise Panic

    with monkeypatch.context() as patch:
        patch.setattr(engine.tokenizer, "stream", Failing)
        with pytest.raises(RequestFailed, match="Panic"):
            await answer(engine, request("bad"))
    async with asyncio.timeout(10):
        await server.abort_seen.wait()
    assert [request_id.partition(":")[2] for request_id in server.aborted] == ["bad"]
    assert server.aborted == [server.asked[0]["rid"]]
    assert not engine._requests
    assert (await answer(engine, request("fine"))).tokens == (97,) * LENGTH


def test_a_server_is_not_gone_because_the_worker_itself_was_suspended() -> None:
    silence = Silence(100.0)
    assert silence.go_on(160.0) < 10.0  # stopped for a minute, and the poll under way ran out of time meanwhile
    assert silence.go_on(165.5) > 10.0
    silence.broken(166.0)
    assert silence.go_on(166.5) == 0.5


async def test_prompts_that_cannot_fit_never_reach_the_server(served: tuple[SglangEngine, Server]) -> None:
    engine, server = served
    with pytest.raises(PromptTooLong):
        await answer(engine, text("r", HUGE))
    assert server.asked == []


async def test_long_prompts_are_tokenized_off_the_loop_and_can_be_aborted_there(
    served: tuple[SglangEngine, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, server = served
    watch = Tokenizing(engine, monkeypatch)
    watch.go_on.clear()
    asking = asyncio.create_task(all_events(engine, text("r", "7 + 5 " * 1_000)))
    await asyncio.to_thread(watch.begun.wait)
    assert watch.threads != [threading.get_ident()]
    assert await engine.abort("r")
    (end,) = await asking
    assert isinstance(end, EngineFinished)
    assert end.reason is FinishReason.ABORTED
    watch.go_on.set()
    assert server.asked == []


async def test_the_server_is_told_of_greedy_decoding_by_a_temperature_of_0(
    served: tuple[SglangEngine, Server],
) -> None:
    engine, server = served
    await answer(engine, request("r"))
    assert server.asked[0]["sampling_params"]["temperature"] == 0.0


async def test_the_server_joins_more_tokens_of_a_reply_that_nobody_streams(
    served: tuple[SglangEngine, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as it makes in the time that they may wait, which it can know beside a reply that runs."""
    engine, server = served
    engine.options = replace(engine.options, hold=OutputCoalescing(0.02, 32))
    monkeypatch.setattr(engine._throughput, "per_second", lambda _: 100.0)
    engine._requests["beside"] = Running([1], 1, "beside", computing=True)
    for interval_s in (None, 0.01, 0.25, 1000.0):
        await answer(engine, replace(request("r"), output_interval_s=interval_s))
    assert [asked["sampling_params"]["stream_interval"] for asked in server.asked] == [2, 2, 25, 32]
    del engine._requests["beside"]
