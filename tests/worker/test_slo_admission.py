"""SLO requests at a worker: answered during a step, declined if that is asked for, and admitted again after a move."""

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import replace

import pytest

from penstock.proto.common.v1 import common_pb2
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.types.replies import FinishReason, TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.slo import Slo
from penstock.types.workers import Admitted, Declined, EngineFinished
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.interface import EngineEvent, LastBlocks
from penstock.worker_service.engine.loop import LoopEngine
from penstock.worker_service.engine.simulated.engine import simulated_core, simulated_engine
from penstock.worker_service.scheduling.policies import PolicyName
from tests.conftest import MeshFileMaker
from tests.support.engines import started
from tests.support.held_steps import StepGate, step_gate
from tests.support.mesh import served_worker
from tests.support.present import present
from tests.support.services import RedisProcess
from tests.support.virtual_clock import VirtualClock
from tests.worker.test_slo_engine import options, pace, request

LIMIT_S = 60
IMPOSSIBLE = pace(1e-3, 1e-4)
EASY = pace(1000.0, 100.0)


async def held_in_a_step(engine: LoopEngine, gate: StepGate, slo: Slo | None) -> AsyncGenerator[EngineEvent, None]:
    """A request whose step is computed until the gate opens; the events behind its admission."""
    asked, _ = request("held", 20, 4, slo)
    events = engine.generate(asked)
    gate.close()
    assert isinstance(await anext(events), Admitted)
    await asyncio.to_thread(gate.inside.wait, LIMIT_S)
    return events


async def first_event(engine: LoopEngine, asked: GenerationRequest) -> EngineEvent:
    async with aclosing(engine.generate(asked)) as events:
        return await anext(events)


@pytest.mark.parametrize("slo", [None, EASY], ids=["best effort", "promised"])
async def test_requests_are_answered_while_a_step_is_computed(slo: Slo | None) -> None:
    """Whatever the step that is computed: admitted, best effort and declined are known before it ends."""
    async with asyncio.timeout(LIMIT_S), started(simulated_engine(options())) as engine:
        with step_gate(engine) as gate:
            events = await held_in_a_step(engine, gate, slo)
            steps = engine.steps
            easy, impossible = request("a", 20, 4, EASY)[0], request("b", 20, 4, IMPOSSIBLE)[0]
            declining = replace(request("c", 20, 4, IMPOSSIBLE)[0], decline_unkept_slo=True)
            answers = await asyncio.gather(*(first_event(engine, each) for each in (easy, impossible, declining)))
            assert engine.steps == steps, "the step is still computed"
            assert isinstance(answers[0], Admitted)
            assert answers[0].slo_kept
            assert isinstance(answers[1], Admitted)
            assert not answers[1].slo_kept
            assert isinstance(answers[2], Declined)
            gate.open()
            async with aclosing(events):
                rest = [event async for event in events]
            assert sum(len(event.token_ids) for event in rest if isinstance(event, TokenFrame)) == 4


@pytest.mark.parametrize("running", [None, EASY], ids=["best effort", "promised"])
def test_what_was_promised_during_a_step_counts_for_the_next_promise_of_the_same_step(running: Slo | None) -> None:
    """Each could be kept alone, not both: whichever asks second during the same step is best effort."""
    clock = VirtualClock()
    core, _ = simulated_core(options(), clock)
    core.add(*request("held", 20, 4, running))
    answers: list[tuple[str, object]] = []

    @contextmanager
    def asked_meanwhile() -> Iterator[None]:
        for name in ("a", "b"):
            core.add(*request(name, 2000, 20, pace(0.4, 100.0)))
            answers.extend(core.decide())
        yield

    core.rows.computing = asked_meanwhile
    core.step()
    core.rows.computing = nullcontext
    assert [(name, getattr(event, "slo_kept", None)) for name, event in answers] == [("a", True), ("b", False)]
    ended = dict[str, float]()
    while not core.idle:
        for name, event in core.step():
            if isinstance(event, TokenFrame):
                ended.setdefault(name, clock.now())
    assert ended["a"] <= 0.4
    assert "b" in ended


def moved(source: EngineCore, target: EngineCore, asked: GenerationRequest) -> tuple[object, object]:
    """Move a decoding request with its KV; the target's first and, if it did not start, last event."""
    tokens = source.transfers.computed_tokens(asked.request_id)
    present = target.transfers.reserve("t", source.runner.kv_layout, tokens)
    stopped = source.transfers.pause(asked.request_id, present)
    last = LastBlocks(present, stopped.data) if len(stopped.data) else None
    prompt = list(stopped.tokens[: len(stopped.tokens) - stopped.output_tokens])
    return target.enter(asked, prompt, "t", stopped.tokens, last)


@pytest.mark.parametrize(
    ("slo", "declines", "expected"),
    [(EASY, True, "standard"), (IMPOSSIBLE, False, "best_effort"), (IMPOSSIBLE, True, "")],
)
def test_a_request_that_moves_in_is_decided_on_at_once(slo: Slo, declines: bool, expected: str) -> None:
    """It is promised its SLO where that can be kept; otherwise best effort, or refused so that it stays at its source."""
    clock = VirtualClock()
    source, _ = simulated_core(options(), clock)
    target, _ = simulated_core(options(), clock)
    asked, prompt = request("r", 20, 40, slo)
    source.add(replace(asked, slo=None), prompt)
    for _ in range(5):
        source.step()
    free = target.load().free_kv_blocks
    admitted, finished = moved(source, target, replace(asked, decline_unkept_slo=declines))
    if not expected:
        assert isinstance(admitted, Declined)
        assert isinstance(finished, EngineFinished)
        assert target.idle
        assert target.load().free_kv_blocks == free, "blocks are given back once"
        assert target.scheduler.free_places == target.limits.batch.max_running
        source.transfers.resume("r")
        assert any(name == "r" for name, _ in source.step())
        return
    assert isinstance(admitted, Admitted)
    assert admitted.slo_kept is not (expected == "best_effort")
    assert target.decide() == [], "its answer is not given twice"
    frames = [event for _, event in target.step() if isinstance(event, TokenFrame)]
    assert [frame.offset for frame in frames] == [5]


def test_headroom_shrinks_with_every_promise_and_returns_with_its_end() -> None:
    clock = VirtualClock()
    core, _ = simulated_core(options(), clock)
    empty = present(core.load().slo)
    assert empty.backlog_s == 0
    assert empty.free_kv_tokens == 32_768
    core.add(*request("a", 5000, 20, pace(1000.0, 0.05)))
    core.step()
    clock.sleep(1.0)
    busy = present(core.load().slo)
    assert busy.backlog_s > 0
    assert busy.prompt_tokens_per_s > 0
    assert busy.free_kv_tokens <= 32_768 - 5020
    while not core.idle:
        core.step()
    clock.sleep(1.0)
    assert core.load().slo == empty
    plain, _ = simulated_core(options(PolicyName.DECODE_FIRST), clock)
    assert plain.load().slo is None


@pytest.mark.parametrize("policy", ["slo", "decode_first"])
async def test_a_worker_declines_over_grpc(policy: str, redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    """The same events from an engine that keeps SLOs and from one that keeps none; only a declining request is refused."""
    slo = common_pb2.Slo(phases=[common_pb2.SloPhase()])
    slo.time_to_first_token.FromMilliseconds(1)
    slo.phases[0].time_per_output_token.FromMicroseconds(10)
    file = mesh_file([{"name": "only", "model": "sim", "batch_policy": policy}])
    async with served_worker(file, redis.url) as (stub, _):
        kinds = {}
        for declines in (False, True):
            generate = pb.GenerateRequest(
                request_id=f"r{declines}",
                prompt=common_pb2.Prompt(text="hello"),
                sampling=common_pb2.SamplingParams(max_tokens=4, ignore_eos=True),
                slo=slo,
                decline_unkept_slo=declines,
            )
            events = [event async for event in stub.Generate(generate) if not event.HasField("alive")]
            kinds[declines] = [event.WhichOneof("event") for event in events]
            last = events[-1].finished
        assert kinds[False][0] == "admitted"
        assert kinds[True] == ["declined", "finished"]
        assert last.reason == common_pb2.FINISH_REASON_DECLINED
        info, load = await stub.GetInfo(pb.GetInfoRequest()), await stub.GetLoad(pb.GetLoadRequest())
        assert (pb.CAPABILITY_SLO in info.capabilities) is (policy == "slo")
        assert load.HasField("slo_headroom") is (policy == "slo")


async def test_requests_that_come_and_leave_during_steps_leave_nothing_behind() -> None:
    """Both threads add, decide and abort: every request ends as it should, and all blocks are free again."""
    draw = random.Random(5)

    async def one(engine: LoopEngine, number: int) -> str:
        slo = draw.choice([EASY, IMPOSSIBLE, pace(5.0, 0.05), None])
        asked = replace(request(f"r{number}", 20 + number, 6, slo)[0], decline_unkept_slo=draw.random() < 0.5)
        leaves = draw.random() < 0.3
        await asyncio.sleep(draw.random() * 0.2)
        tokens = 0
        async with aclosing(engine.generate(asked)) as events:
            async for event in events:
                if leaves:
                    return "left"
                match event:
                    case TokenFrame():
                        tokens += len(event.token_ids)
                    case EngineFinished():
                        assert tokens == (0 if event.reason is FinishReason.DECLINED else 6)
                        return event.reason.value
        raise EOFError

    async with started(simulated_engine(options(max_running=8, max_queued=200))) as engine, asyncio.timeout(LIMIT_S):
        ends = await asyncio.gather(*(one(engine, number) for number in range(120)))
        assert {*ends} == {"left", "length", "declined"}
        while engine.load().requests or engine.load().free_kv_blocks < engine.info.kv_blocks:
            await asyncio.sleep(0.01)
