"""SLOs at SGLang workers, a prediction: its decisions, the engine around a small server of the test's own, and a real one."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from penstock.services.domain.latency import StepLatencyModel
from penstock.services.domain.slo.attainment import AttainmentTracker
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.mesh_schema.slo import MeshSlo
from penstock.services.mesh_schema.tiers import MeshTier
from penstock.services.settings import ServiceSettings
from penstock.types.prompts import TokenPrompt
from penstock.types.replies import FinishReason, TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.slo import Slo, SloClass, SloPhase
from penstock.types.workers import Admitted, Declined, EngineFinished
from penstock.worker_service.compose import build_engine
from penstock.worker_service.engine.interface import Capability, EngineEvent, StepPredicting
from penstock.worker_service.engine.sglang.client import ServerInfo
from penstock.worker_service.engine.sglang.engine import SglangEngine
from penstock.worker_service.engine.sglang.launch import ServerShape, command
from penstock.worker_service.engine.sglang.moves import Running
from penstock.worker_service.engine.sglang.server_link import SglangEngineOptions
from penstock.worker_service.engine.sglang.shadow import CHUNKS_AHEAD, ShadowScheduler, chunk_within
from penstock.worker_service.engine.sglang.turns import SendQueue
from penstock.worker_service.scheduling.sequence import SequenceSlo
from tests.conftest import FAMILY
from tests.support.engines import started, until
from tests.support.sglang import SglangServers, cpu_shape
from tests.support.sglang_stub import Server, attached

LIMIT_S = 60
LATENCY = StepLatencyModel.linear(0.01, 1e-4, 0.0)


def server_info(
    step_tokens: int = 512, page_tokens: int = 16, kv_tokens: int = 8192, max_running: int = 64
) -> ServerInfo:
    limits = (2000, kv_tokens, page_tokens, step_tokens, max_running)
    return ServerInfo({}, *limits, 1, 1, False, True, True, False)


LIMITS = server_info(step_tokens=200, page_tokens=1, kv_tokens=4000, max_running=8)
EASY, IMPOSSIBLE = Slo(1000.0, (SloPhase(0, 100.0),)), Slo(1e-4, (SloPhase(0, 1e-7),))


def running(
    name: str, tokens: int, slo: SequenceSlo | None = None, granted: SloClass | None = None, *, state: str = "waits"
) -> Running:
    """A request; state: waits, sent (its prompt is computed) or decodes."""
    one = Running([7] * tokens, tokens, name, slo=slo)
    if slo is not None:
        slo.granted = granted
    if state == "waits":
        one.turn = asyncio.get_running_loop().create_future()
    one.sent, one.answered = state != "waits", state == "decodes"
    return one


def promised(name: str, tokens: int, due_s: float, *, tpot_s: float = 0.1, state: str = "waits") -> Running:
    return running(name, tokens, SequenceSlo(due_s, tpot_s, 20), SloClass.STANDARD, state=state)


def names(requests: tuple[Running, ...]) -> list[str]:
    return [one.server_id for one in requests]


async def test_without_promises_everything_is_sent_at_once() -> None:
    turns = ShadowScheduler(LATENCY, LIMITS).plan([running(f"r{i}", 3000) for i in range(20)])
    assert names(turns.send) == [f"r{i}" for i in range(20)]
    assert turns.pause == ()


async def test_promised_prompts_go_by_deadline_and_few_chunks_ahead() -> None:
    """The server takes prompts as they come, so that what is due first must not wait behind what it has already."""
    requests = [promised("late", 150, 9.0), promised("soon", 150, 1.0), promised("later", 150, 12.0)]
    assert CHUNKS_AHEAD * LIMITS.step_tokens == 400
    assert names(ShadowScheduler(LATENCY, LIMITS).plan(requests).send) == ["soon", "late"]
    long = [promised("long", 3000, 1.0), promised("short", 10, 2.0)]
    assert names(ShadowScheduler(LATENCY, LIMITS).plan(long).send) == ["long"], "alone, whatever its length"


async def test_best_effort_gives_way_the_last_one_first() -> None:
    """Paused where it takes the place, the KV, the prompt's turn or the pace of a promised request; otherwise left alone."""
    shadow = ShadowScheduler(LATENCY, LIMITS)
    harmless = [running("b0", 300, state="decodes"), promised("p", 100, 1.0)]
    assert (names(shadow.plan(harmless).send), shadow.plan(harmless).pause) == (["p"], ())
    places = [running(f"b{i}", 10, state="decodes") for i in range(8)]
    turns = shadow.plan([*places, promised("p", 100, 1.0)])
    assert (names(turns.send), names(turns.pause)) == (["p"], ["b7"])
    kv = [running(f"b{i}", 1300, state="decodes") for i in range(3)]
    turns = shadow.plan([*kv, promised("p", 500, 1.0)])
    assert (names(turns.send), names(turns.pause)) == (["p"], ["b2"])
    prompts = [running("b0", 300, state="sent"), running("b1", 300, state="sent")]
    turns = shadow.plan([*prompts, promised("p", 150, 1.0)])
    assert (names(turns.send), names(turns.pause)) == (["p"], ["b1", "b0"])
    slow = ShadowScheduler(StepLatencyModel.linear(0.0, 0.02, 0.0), LIMITS)
    tight = [promised("p", 10, 1.0, tpot_s=0.05, state="decodes")]
    turns = slow.plan([*tight, *(running(f"b{i}", 10, state="decodes") for i in range(4))])
    assert names(turns.pause) == ["b3", "b2", "b1"], "two decodes fit the pace"


async def test_best_effort_waits_while_it_would_be_paused_again() -> None:
    shadow = ShadowScheduler(StepLatencyModel.linear(0.0, 0.02, 0.0), LIMITS)
    decodes = [promised(f"p{i}", 10, 1.0, tpot_s=0.05, state="decodes") for i in range(2)]
    waiting = running("b", 1)
    assert shadow.plan([*decodes, waiting]).send == ()
    assert names(shadow.plan([decodes[0], waiting]).send) == ["b"]
    assert names(shadow.plan([waiting]).send) == ["b"]


async def test_admission_is_by_the_predicted_steps_and_their_correction() -> None:
    """A prompt of four chunks, 30 ms each: in time within 150 ms, not within 100; and not once steps take twice as long."""
    for due_s, tpot_s, admitted in ((0.15, 0.1, True), (0.1, 0.1, False), (1.0, 0.005, False)):
        shadow = ShadowScheduler(LATENCY, LIMITS)
        new = running("n", 800, SequenceSlo(due_s, tpot_s, 20))
        assert shadow.decide(0.0, [], [new]) == [admitted], (due_s, tpot_s)
    shadow = ShadowScheduler(LATENCY, LIMITS)
    for _ in range(30):
        shadow.correction.add(0.01, 0.02)
    assert shadow.decide(0.0, [], [running("n", 800, SequenceSlo(0.15, 0.1, 20))]) == [False]


async def test_tokens_that_arrive_in_bursts_do_not_make_steps_look_slow() -> None:
    """Ten tokens in the time of ten steps, five at a time: the correction stays at one; a slow server's is two."""
    clock_s = [100.0]
    for slowness in (1.0, 2.0):
        shadow, one = ShadowScheduler(LATENCY, LIMITS), running("r", 100, state="decodes")
        turns = SendQueue({"r": one}, lambda _: None, shadow, lambda: clock_s[0])
        for _ in range(30):
            for arrived in range(10):
                clock_s[0] += 5 * slowness * shadow.uncorrected_step_s([one]) if arrived % 5 == 4 else 0.0
                turns.arrived(one, 1)
        assert shadow.correction.factor == pytest.approx(slowness, rel=0.02)


async def test_admission_counts_the_kv_and_the_places_of_those_promised_only() -> None:
    """A prompt of .12 s, beside replies that end, and give their places back, after .2 s."""
    shadow = ShadowScheduler(LATENCY, LIMITS)
    for others, due_s, admitted in (
        ([promised("a", 2000, 9.0, state="decodes")], 5.0, True),
        ([promised("a", 3500, 9.0, state="decodes")], 5.0, False),
        ([running("b", 3500, state="decodes")], 5.0, True),
        ([promised(f"p{i}", 10, 9.0, state="decodes") for i in range(8)], 5.0, True),
        ([promised(f"p{i}", 10, 9.0, state="decodes") for i in range(8)], 0.2, False),
        ([running(f"b{i}", 10, state="decodes") for i in range(8)], 0.2, True),
    ):
        new = running("n", 800, SequenceSlo(due_s, 0.1, 20))
        assert shadow.decide(0.0, others, [new]) == [admitted], others
    kept = promised("only its first token was promised", 3500, float("inf"), tpot_s=float("inf"), state="decodes")
    assert shadow.decide(0.0, [kept], [running("n", 800, SequenceSlo(5.0, 0.1, 20))]) == [False]


async def test_headroom_is_what_promises_leave() -> None:
    shadow = ShadowScheduler(LATENCY, LIMITS)
    idle = shadow.headroom([running("b", 3000, state="decodes")])
    assert (idle.backlog_s, idle.free_kv_tokens) == (0.0, 4000)
    busy = shadow.headroom([promised("p", 1000, 1.0), promised("d", 500, 1.0, state="decodes")])
    assert busy.backlog_s == pytest.approx(1000 / busy.prompt_tokens_per_s)
    assert busy.prompt_tokens_per_s < idle.prompt_tokens_per_s
    assert busy.free_kv_tokens == 4000 - 1020 - 520


def test_the_chunk_is_the_largest_that_keeps_the_tightest_pace_in_full_pages() -> None:
    """10 ms and 0.1 ms per token: 50 ms hold 400 tokens, of which 16 are decodes."""
    assert chunk_within(0.05, LATENCY, server_info()) == 384
    assert chunk_within(1.0, LATENCY, server_info()) == 512
    assert chunk_within(1e-3, LATENCY, server_info()) == 16


def test_a_server_is_started_with_steps_that_mix_prompts_and_decodes() -> None:
    assert "--enable-mixed-chunk" in command(ServerShape("python", "m", "m", mixed_chunk=True), 1)
    assert "--enable-mixed-chunk" not in command(ServerShape("python", "m", "m"), 1)
    tier = MeshTier(name="t", engine="sglang", model=str(FAMILY / "small"), batch_policy="slo")
    slo = MeshSlo.model_validate(
        {"classes": {"a": {"time_per_output_token_s": 0.2}, "b": {"phases": [{"time_per_output_token_s": 0.05}]}}}
    )
    engine = build_engine(MeshFile(tiers=(tier,), slo=slo), tier, ServiceSettings())
    assert isinstance(engine, SglangEngine)
    assert (engine.options.keeps_slos, engine.options.tightest_tpot_s) == (True, 0.05)
    assert engine.options.launch is not None
    assert engine.options.launch.mixed_chunk


class HoldingServer(Server):
    """Generates as many tokens as it is asked for, at once. Aborts end a reply as SGLang does, with the tokens so far.

    held: replies that stop, the first time they are sent, behind so many tokens until they are aborted or in `released`.
    """

    def __init__(self, max_running: int) -> None:
        super().__init__()
        self.info |= {"page_size": 16, "max_running_requests": max_running, "chunked_prefill_size": 256}
        self.held: dict[str, int] = {}
        self.released: set[str] = set()
        self.ended: dict[str, asyncio.Event] = {}

    def sent(self, name: str) -> list[dict[str, Any]]:
        """The bodies with which a request was sent, one for each time."""
        return [body for body in self.asked if body["rid"].partition(":")[2] == name]

    @property
    def order(self) -> list[str]:
        return [body["rid"].partition(":")[2] for body in self.asked]

    async def abort(self, request: web.Request) -> web.Response:
        self.ended.setdefault((await request.json())["rid"], asyncio.Event()).set()
        return web.Response()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            began = time.perf_counter()
            times = {"forward_entry_time": began, "prefill_finished_time": began + 1e-5 * len(body["input_ids"])}
            return web.json_response({"meta_info": {**times, "finish_reason": {"type": "length"}}})
        self.asked.append(body)
        ended = self.ended.setdefault(body["rid"], asyncio.Event())
        most, name = body["sampling_params"]["max_new_tokens"], body["rid"].partition(":")[2]
        stops_behind = self.held.pop(name, most)
        response = web.StreamResponse()
        await response.prepare(request)
        for count in range(1, most + 1):
            while count > stops_behind and name not in self.released and not ended.is_set():
                await asyncio.sleep(0.001)
            finish = {"type": "length"} if count == most else None
            if ended.is_set():
                count, finish = count - 1, {"type": "abort"}
            await self.write(response, [97 + at % 26 for at in range(count)], finish)
            if finish is not None:
                break
        return response


@asynccontextmanager
async def served(max_running: int = 8) -> AsyncIterator[tuple[SglangEngine, HoldingServer]]:
    server = HoldingServer(max_running)
    async with asyncio.timeout(LIMIT_S), attached(server, keeps_slos=True) as engine:
        server.asked.clear()  # of the calibration
        yield engine, server


def asked(name: str, slo: Slo | None, tokens: int = 8, **more: Any) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(name, TokenPrompt(tuple(b"abcd" + name.encode())), sampling, slo=slo, **more)


async def events_of(engine: SglangEngine, request: GenerationRequest) -> list[EngineEvent]:
    return [event async for event in engine.generate(request)]


def tokens_of(events: list[EngineEvent]) -> list[int]:
    return [token for event in events if isinstance(event, TokenFrame) for token in event.token_ids]


async def test_each_request_is_told_in_which_class_it_is_served() -> None:
    async with served() as (engine, server):
        answers = await asyncio.gather(
            *(
                events_of(engine, asked(name, slo, decline_unkept_slo=declines))
                for name, slo, declines in (
                    ("easy", EASY, False),
                    ("impossible", IMPOSSIBLE, False),
                    ("declined", IMPOSSIBLE, True),
                    ("plain", None, False),
                )
            )
        )
        easy, impossible, declined, plain = answers
        for events, best_effort in ((easy, False), (impossible, True), (plain, True)):
            assert isinstance(events[0], Admitted)
            assert events[0].slo_kept is not best_effort
            assert len(tokens_of(events)) == 8
        assert isinstance(declined[0], Declined)
        assert isinstance(declined[1], EngineFinished)
        assert declined[1].reason is FinishReason.DECLINED
        assert not server.sent("declined")
        assert Capability.SLO_PREDICTED in engine.info.capabilities
        assert Capability.SLO not in engine.info.capabilities, "it is a prediction"
        assert engine.load().slo is not None
        assert isinstance(engine, StepPredicting)
        assert engine.latency_correction is not None
        assert not engine._requests


async def test_best_effort_is_paused_by_an_abort_and_resumes_behind_its_tokens() -> None:
    """One place: the admitted request takes it, and the other continues afterwards without a token lost or doubled."""
    async with served(max_running=1) as (engine, server):
        server.held = {"best": 2}
        best = asyncio.create_task(events_of(engine, asked("best", None, tokens=6)))
        await until(lambda: any(r.output_tokens == 2 for r in engine._requests.values()))
        promised_events = await events_of(engine, asked("promised", EASY))
        assert isinstance(promised_events[0], Admitted)
        assert promised_events[0].slo_kept
        assert len(tokens_of(promised_events)) == 8
        best_events = await best
        first, second = server.sent("best")
        assert server.ended[first["rid"]].is_set()
        assert first["rid"] != second["rid"]
        assert second["input_ids"] == [*first["input_ids"], 97, 98]
        assert second["sampling_params"]["max_new_tokens"] == 4
        assert tokens_of(best_events) == [97, 98, 97, 98, 99, 100]
        finished = best_events[-1]
        assert isinstance(finished, EngineFinished)
        assert (finished.reason, finished.preemptions) == (FinishReason.LENGTH, 1)
        assert server.order == ["best", "promised", "best"]


async def test_a_request_can_be_aborted_while_it_waits_for_its_turn() -> None:
    """A best-effort request waits behind a promised one that holds the only place."""
    async with served(max_running=1) as (engine, server):
        server.held = {"promised": 2}
        promised_task = asyncio.create_task(events_of(engine, asked("promised", EASY)))
        await until(lambda: bool(server.sent("promised")))
        waiting = asyncio.create_task(events_of(engine, asked("waiting", None)))
        await until(lambda: any(r.waits for r in engine._requests.values()))
        await engine.abort("waiting")
        last = (await waiting)[-1]
        assert isinstance(last, EngineFinished)
        assert last.reason is FinishReason.ABORTED
        assert not server.sent("waiting"), "it never reached the server"
        assert await engine.abort("promised")
        assert isinstance((await promised_task)[-1], EngineFinished)
        assert not engine._requests
        assert len(tokens_of(await events_of(engine, asked("next", EASY)))) == 8


async def test_waiting_prompts_are_sent_by_deadline() -> None:
    """Two chunks are ahead at most. Then the tighter of two goes first, though it came later."""
    async with served() as (engine, server):
        server.held = {"first": 0}
        tasks = []
        for name, ttft_s, count in (("first", 800.0, 400), ("loose", 900.0, 200), ("tight", 500.0, 200)):
            request = replace(asked(name, Slo(ttft_s, (SloPhase(0, 100.0),))), prompt=TokenPrompt((97,) * count))
            tasks.append(asyncio.create_task(events_of(engine, request)))

            def arrived(name: str = name) -> bool:
                return bool(server.sent(name)) or (name in engine._requests and engine._requests[name].waits)

            await until(arrived)
        await until(lambda: bool(server.sent("first")))
        assert server.order == ["first"]
        server.released.add("first")
        answers = await asyncio.gather(*tasks)
        assert server.order == ["first", "tight", "loose"]
        assert [len(tokens_of(events)) for events in answers] == [8, 8, 8]


@pytest.mark.sglang
@pytest.mark.timeout(400)
async def test_a_real_server_keeps_what_is_promised_and_serves_the_rest(sglang_servers: SglangServers) -> None:
    """A burst with generous objectives, as many as the server has places for, is promised and attained by the client's
    clock; impossible ones are served as best effort, whole."""
    url = await sglang_servers.url(cpu_shape(FAMILY / "small", max_running=8))
    options = SglangEngineOptions(FAMILY / "small", "small", url, keeps_slos=True)

    async def outcome(name: str, slo: Slo) -> tuple[bool, bool]:
        """(promised, attained)."""
        tracker = AttainmentTracker(slo.time_to_first_token_s)
        began_s, tokens, promised = time.perf_counter(), 0, False
        async for event in engine.generate(asked(name, slo, tokens=24)):
            if isinstance(event, Admitted):
                promised = event.slo_kept
            elif isinstance(event, TokenFrame):
                for _ in event.token_ids:
                    tokens += 1
                    tracker.token(time.perf_counter() - began_s, slo.phases[0].time_per_output_token_s)
        assert tokens == 24
        return promised, tracker.result().attained

    async with started(SglangEngine(options)) as engine:
        assert Capability.SLO_PREDICTED in engine.info.capabilities
        generous = Slo(300.0, (SloPhase(0, 30.0),))
        assert await asyncio.gather(*(outcome(f"g{i}", generous) for i in range(8))) == [(True, True)] * 8
        impossible = await asyncio.gather(*(outcome(f"i{i}", IMPOSSIBLE) for i in range(3)))
        assert not any(promised or attained for promised, attained in impossible)
