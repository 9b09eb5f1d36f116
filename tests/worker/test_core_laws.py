"""Laws of the engine core: whatever ends, nothing is held; every token has its text and its own random numbers."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.services.domain.errors import AlreadyRunning, InvalidRequest, NotFound, Overloaded, PromptTooLong
from penstock.services.domain.latency import StepLatencyModel
from penstock.types.prompts import TextPrompt
from penstock.types.replies import FinishReason, TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.workers import EngineFinished
from penstock.worker_service.engine.busy_share import BusyShare
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.interface import LastBlocks
from penstock.worker_service.engine.simulated.engine import SimulatedEngineOptions, simulated_core
from tests.support.present import present
from tests.support.virtual_clock import VirtualClock

PROMPT = [*b"the first words of a prompt"]
ENDLESS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
BLOCKS, BLOCK_TOKENS, RUNNING = 16, 8, 3


def engine(clock: VirtualClock | None = None, **options: Any) -> EngineCore:
    shape = {
        "kv_tokens": BLOCKS * BLOCK_TOKENS,
        "kv_block_tokens": BLOCK_TOKENS,
        "max_running": RUNNING,
        "max_queued": 2,
    }
    latency = StepLatencyModel.linear(0.01, 0.0, 0.0)
    return simulated_core(SimulatedEngineOptions("sim", latency, **shape | options), clock or VirtualClock())[0]


def request(name: str = "a", sampling: SamplingParams = ENDLESS, **fields: Any) -> GenerationRequest:
    return GenerationRequest(name, TextPrompt("unused"), sampling, **fields)


def run(
    core: EngineCore, steps: int = 500, *, look: Callable[[EngineCore], None] = lambda _: None
) -> dict[str, list[Any]]:
    """The outputs of so many steps, by request; `look` sees the engine behind each."""
    outputs: dict[str, list[Any]] = {}
    for _ in range(steps):
        if core.idle:
            break
        for name, output in core.step():
            outputs.setdefault(name, []).append(output)
        look(core)
    return outputs


def before_each_pass(core: EngineCore, look: Callable[[Any], object]) -> None:
    """Have `look` see the rows of each pass; if it raises, the pass fails."""
    compute = core.runner.run

    def watched(rows: Any) -> Any:
        look(rows)
        return compute(rows)

    core.runner.run = watched  # type: ignore[method-assign]


def text_of(outputs: Seq[Any]) -> str:
    return "".join(output.text for output in outputs if isinstance(output, TokenFrame))


def tokens_of(outputs: Seq[Any]) -> list[int]:
    return [token for output in outputs if isinstance(output, TokenFrame) for token in output.token_ids]


def nothing_held(core: EngineCore) -> bool:
    """No block, no place, no request."""
    scheduler = core.scheduler
    return (scheduler.pool.free, scheduler.free_places, core.idle, len(core._requests)) == (BLOCKS, RUNNING, True, 0)


def paused(core: EngineCore, name: str = "a", output: int = 5) -> tuple[list[int], LastBlocks]:
    """All tokens of a request that has generated `output` tokens and is paused, and its KV."""
    core.add(request(name), PROMPT)
    for _ in range(output):
        core.step()
    stopped = core.transfers.pause(name, 0)
    return list(stopped.tokens), LastBlocks(0, stopped.data)


def test_a_move_takes_blocks_of_its_own_salt_only() -> None:
    """The target has the prompt under another salt: nothing of it is present for the request that comes."""
    target = engine()
    target.add(replace(request("known"), cache_salt="a"), PROMPT)
    run(target)
    layout = target.runner.kv_layout
    there = {salt: target.transfers.reserve(f"t{salt}", layout, PROMPT, salt) for salt in ("", "a", "b")}
    assert there["a"] > 0
    assert (there[""], there["b"]) == (0, 0)


def test_a_reply_that_moves_is_the_same_reply() -> None:
    """Its KV, its text and its place in the order of random numbers continue; the source holds nothing afterwards."""
    whole = engine()
    whole.add(request(), PROMPT)
    expected = run(whole)["a"]
    source, target = engine(), engine()
    source.add(request(), PROMPT)
    before = [output for _ in range(5) for _, output in source.step()]
    stopped = source.transfers.pause("a", 0)
    target.transfers.reserve("t", source.runner.kv_layout, PROMPT)
    admitted, finished = target.enter(request(), PROMPT, "t", list(stopped.tokens), LastBlocks(0, stopped.data))
    assert admitted is not None
    assert finished is None
    source.leave("a")
    after = run(target)["a"]
    assert tokens_of(before) + tokens_of(after) == tokens_of(expected)
    assert text_of(before) + text_of(after) == text_of(expected)
    assert [f.offset for f in (*before, *after) if isinstance(f, TokenFrame)] == [*range(20)]
    assert nothing_held(source)
    assert nothing_held(target)
    source.leave("a")  # again: no error


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"tokens": [1, 2, 3]}, InvalidRequest),
        ({"name": "busy"}, AlreadyRunning),
        ({"transfer": "other"}, NotFound),
        ({"last": LastBlocks(99, np.zeros((0, 2)))}, InvalidRequest),
        ({"tokens": [*PROMPT, *range(18)]}, InvalidRequest),
        ({"tokens": [*PROMPT, *range(30)]}, InvalidRequest),
        ({"prompt": [*range(200)], "tokens": [*range(201)]}, PromptTooLong),
    ],
)
def test_a_move_that_fails_leaves_nothing_behind(change: dict[str, Any], error: type[Exception]) -> None:
    """Whatever is wrong with it; what else runs there is not touched."""
    source, target = engine(), engine()
    tokens, last = paused(source)
    target.add(request("busy"), PROMPT)
    target.step()
    free, places = target.scheduler.pool.free, target.scheduler.free_places
    target.transfers.reserve("t", source.runner.kv_layout, [*range(30, 60)])
    with pytest.raises(error):
        target.enter(
            request(change.get("name", "a")),
            change.get("prompt", PROMPT),
            change.get("transfer", "t"),
            change.get("tokens", tokens),
            change.get("last", None if "tokens" in change or "name" in change else last),
        )
    if "transfer" in change:
        target.transfers.release("t")
    with pytest.raises(NotFound):
        target.transfers.take("t")
    assert (target.scheduler.pool.free, target.scheduler.free_places) == (free, places)
    run(target)
    assert nothing_held(target)


def test_kv_that_cannot_be_written_frees_the_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = engine(), engine()
    tokens, last = paused(source)
    target.transfers.reserve("t", source.runner.kv_layout, PROMPT)

    def fails(*_: object) -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(target.runner, "write_blocks", fails)
    with pytest.raises(RuntimeError, match="no more memory"):
        target.enter(request(), PROMPT, "t", tokens, last)
    assert nothing_held(target)
    with pytest.raises(NotFound):
        target.transfers.take("t")


def test_a_reply_that_is_complete_when_it_arrives_ends_at_once() -> None:
    """Resumed or moved; with its usage, and without a place."""
    whole = engine()
    whole.add(request(), PROMPT)
    tokens = tokens_of(run(whole)["a"])
    admitted, ended = engine().add(request(resume_token_ids=tuple(tokens)), PROMPT)
    assert admitted is not None
    assert present(ended).reason is FinishReason.LENGTH
    assert (present(ended).usage.prompt_tokens, present(ended).usage.output_tokens) == (len(PROMPT), 20)
    source, target = engine(), engine()
    target.transfers.reserve("t", source.runner.kv_layout, [*PROMPT, *tokens][:-1])
    _, finished = target.enter(request(), PROMPT, "t", [*PROMPT, *tokens])
    assert finished is not None
    assert nothing_held(target)


def test_the_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    """Its last character might have begun one; when the reply ends, it has not."""
    core = engine()
    core.add(request(), PROMPT)
    expected = text_of(run(core)["a"])
    core = engine()
    stop = (expected[-2:] + "?",)
    core.add(request(sampling=replace(ENDLESS, stop=stop)), PROMPT)
    assert text_of(run(core)["a"]) == expected
    core = engine()
    core.add(request(sampling=replace(ENDLESS, stop=(expected[3:6],))), PROMPT)
    outputs = run(core)["a"]
    assert text_of(outputs) == expected[: expected.index(expected[3:6])]
    assert (outputs[-1].reason, outputs[-1].stop) == (FinishReason.STOP, expected[3:6])


def test_every_position_has_random_numbers_of_its_own() -> None:
    """The offset of a row is the position of the token that it chooses: each once, moved, resumed or not."""
    core = engine(max_step_tokens=8)
    offsets: list[int] = []
    before_each_pass(core, lambda rows: offsets.extend(row.offset for row in rows if row.logits))
    core.add(request(), PROMPT)
    tokens = tokens_of(run(core)["a"])
    assert offsets == [*range(20)]
    offsets.clear()
    core.add(request(resume_token_ids=tuple(tokens[:7])), PROMPT)
    run(core)
    assert offsets == [*range(7, 20)]


def test_a_full_queue_refuses_with_a_time_and_an_id_in_use_is_refused() -> None:
    core = engine()
    for i in range(RUNNING + 2):
        core.add(request(f"r{i}"), PROMPT)
    with pytest.raises(Overloaded, match="5 requests are already waiting") as refused:
        core.add(request("more"), PROMPT)
    assert 0.1 <= refused.value.retry_after_s <= 10
    with pytest.raises(AlreadyRunning):
        core.add(request("r0"), PROMPT)
    core.step()
    assert len(core.scheduler.running) == RUNNING
    with pytest.raises(Overloaded, match="2 requests are already waiting"):
        core.add(request("more"), PROMPT)
    outputs = run(core)
    assert all(isinstance(outputs[f"r{i}"][-1], EngineFinished) for i in range(RUNNING + 2))
    assert nothing_held(core)


def test_an_aborted_request_leaves_at_once() -> None:
    """Waiting or running; with what it has generated."""
    core = engine()
    for i in range(RUNNING + 1):
        core.add(request(f"r{i}"), PROMPT)
    core.step()
    core.step()
    for name, output in (("r0", 2), (f"r{RUNNING}", 0)):
        finished = present(core.abort(name))
        assert (finished.reason, finished.usage.output_tokens) == (FinishReason.ABORTED, output)
        assert core.abort(name) is None
    run(core)
    assert nothing_held(core)


def test_load_counts_what_was_computed() -> None:
    clock = VirtualClock()
    core = engine(clock, max_queued=8)
    for i in range(RUNNING + 1):
        core.add(request(f"r{i}"), PROMPT)
    for _ in range(10):
        core.step()
    load = core.load()
    assert core.steps == 10
    assert load.running_tokens == (len(PROMPT) + 10,) * RUNNING
    assert load.queued_tokens == (len(PROMPT),)
    assert load.input_tokens == (len(PROMPT),) * (RUNNING + 1)
    assert load.free_kv_blocks == core.scheduler.pool.free < BLOCKS
    assert load.output_tokens_per_s == pytest.approx(RUNNING / 0.01, rel=0.2)
    core.restart_throughput()
    assert core.load().output_tokens_per_s == 0


def test_a_runner_that_can_compute_nothing_is_reported() -> None:
    """With its own error, and the probe's block is free again; one that can still compute goes on."""
    core, fails = engine(), True

    def broken(rows: Any) -> None:
        if fails or rows[0].tokens != (0,):
            raise RuntimeError("no more memory")

    before_each_pass(core, broken)
    core.add(request(), PROMPT)
    with pytest.raises(RuntimeError, match="no more memory"):
        core.step()
    assert nothing_held(core)
    fails = False
    core.add(request("b"), PROMPT)
    ((name, _),) = core.step()
    assert name == "b"
    assert nothing_held(core)


def test_the_time_of_every_step_is_shared_among_its_requests_by_their_tokens() -> None:
    clock = VirtualClock()
    core = engine(clock, kv_tokens=64 * BLOCK_TOKENS, max_step_tokens=64)
    core.add(request("long"), [*range(40, 90)])
    core.add(request("short"), [*range(10)])
    ended = {name: outputs[-1].usage for name, outputs in run(core).items()}
    assert {usage.output_tokens for usage in ended.values()} == {20}
    assert sum(usage.compute_s for usage in ended.values()) == pytest.approx(clock.now())
    # 0.01 s for a step with 50 and 10 tokens of prompts, then a token each
    assert ended["long"].compute_s == pytest.approx(0.01 * 50 / 60 + 19 * 0.005)
    assert ended["short"].compute_s == pytest.approx(0.01 * 10 / 60 + 19 * 0.005)


def test_an_engine_whose_steps_are_unknown_is_shared_equally() -> None:
    now_s = 5.0
    share = BusyShare(lambda: now_s)
    first = share.enter()
    now_s = 6.0
    second = share.enter()
    now_s = 8.0
    assert share.leave(first) == pytest.approx(1.0 + 2.0 / 2)
    now_s = 9.0
    assert share.leave(second) == pytest.approx(2.0 / 2 + 1.0)
    now_s = 20.0  # nobody is there
    third = share.enter()
    now_s = 20.5
    assert share.leave(third) == pytest.approx(0.5)
