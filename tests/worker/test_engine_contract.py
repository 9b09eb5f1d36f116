"""One suite for every engine: what a worker may rely on, and how KV leaves one and enters another."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.services.domain.errors import (
    AlreadyRunning,
    InvalidRequest,
    NotFound,
    Overloaded,
    PromptTooLong,
    Unavailable,
    UnsupportedByModel,
)
from penstock.types.prompts import TextPrompt, TokenPrompt
from penstock.types.replies import FinishReason, TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.workers import Admitted, EngineFinished, HandedOver, KvLayout
from penstock.worker_service.engine.interface import Capability, LastBlocks
from penstock.worker_service.engine.loop import LoopEngine
from penstock.worker_service.scheduling.batching import BatchScheduler
from tests.support.engines import (
    ENDLESS,
    ENGINES,
    GREEDY,
    NARROW,
    QUESTIONS,
    SAMPLED,
    Got,
    Make,
    answer,
    collect,
    engines_of,
    move,
    needs,
    nothing_held,
    repeatable,
    request,
    until,
    waits_at,
)
from tests.support.held_steps import held
from tests.support.present import present
from tests.support.token_events import iterated


@pytest.fixture(params=ENGINES)
async def make(request: pytest.FixtureRequest, gguf_family: Callable[[str], Path]) -> AsyncIterator[Make]:
    async with engines_of(request, gguf_family) as build:
        yield build


async def test_a_reply_is_admitted_streamed_and_finished(make: Make) -> None:
    engine = await make()
    got = await answer(engine, request("r"))
    assert len(got.tokens) == 24
    assert present(got.finished).reason is FinishReason.LENGTH
    assert present(got.admitted).prompt_tokens == present(got.finished).usage.prompt_tokens > 0
    assert present(got.admitted).max_output_tokens == 24
    assert got.text == engine.tokenizer.decode(got.tokens)


async def test_tokens_by_call_are_those_by_iteration(make: Make) -> None:
    """With a taker of tokens, frames go to it, behind Admitted and before the end; only the other events are iterated."""
    engine = await make()
    for asked in (
        request("r"),
        request("l", sampling=replace(GREEDY, top_logprobs=1)),
        request("w", output_interval_s=0.5),
    ):
        by_iteration = await answer(engine, asked)
        by_call = await collect(iterated(partial(engine.generate, asked)))
        assert by_call.admitted == by_iteration.admitted
        parts = (by_call.tokens, by_call.text, by_call.logprobs)
        assert parts == (by_iteration.tokens, by_iteration.text, by_iteration.logprobs)
        iterated_alone = [type(event) async for event in engine.generate(asked, lambda _: None)]
        assert iterated_alone == [Admitted, EngineFinished]


async def test_replies_do_not_depend_on_company(make: Make) -> None:
    """Greedy and seeded replies are the same alone and together, in one step and in chunks."""
    wide, narrow = await make(), await make(**NARROW)
    for sampling in repeatable(wide):
        alone = [(await answer(wide, request(f"a{i}", q, sampling))).tokens for i, q in enumerate(QUESTIONS)]
        for engine in (wide, narrow):
            asked = [request(f"t{i}", q, sampling) for i, q in enumerate(QUESTIONS)]
            together = await asyncio.gather(*(answer(engine, r) for r in asked))
            assert [got.tokens for got in together] == alone


async def test_a_stop_string_ends_the_reply_before_it(make: Make) -> None:
    engine = await make()
    whole = (await answer(engine, request("a"))).text
    stop = whole[5:7]
    got = await answer(engine, request("b", sampling=replace(GREEDY, stop=("never", stop))))
    assert got.text == whole[: whole.find(stop)]
    assert present(got.finished).reason is FinishReason.STOP
    assert present(got.finished).stop == stop


async def test_a_stop_token_ends_the_reply_before_it(make: Make) -> None:
    """It is a token of the reply, but its text is not. It ends replies that ignore the end token, too."""
    engine = await make()
    whole = await answer(engine, request("a"))
    stop = whole.tokens[6]
    first = whole.tokens.index(stop)
    got = await answer(engine, request("b", sampling=replace(GREEDY, stop_token_ids=(stop,))))
    assert got.tokens == whole.tokens[: first + 1]
    assert got.text == engine.tokenizer.decode(whole.tokens[:first])
    assert present(got.finished).reason is FinishReason.STOP
    assert present(got.finished).stop is None


async def test_a_bias_allows_and_forbids_tokens(make: Make) -> None:
    engine = await make()
    whole = await answer(engine, request("a"))
    forbidden = dict.fromkeys(whole.tokens[:4], -100.0)
    got = await answer(engine, request("b", sampling=replace(GREEDY, logit_bias=forbidden)))
    assert not set(got.tokens) & set(forbidden)
    letter = engine.tokenizer.encode_text("q")[0]
    forced = await answer(engine, request("c", sampling=replace(GREEDY, logit_bias={letter: 100.0})))
    assert set(forced.tokens) == {letter}


async def test_tokens_that_the_model_does_not_have_are_refused(make: Make) -> None:
    engine = await make()
    beyond = engine.tokenizer.vocab_size
    for field, sampling in (
        ("logit_bias", replace(GREEDY, logit_bias={beyond: 1.0})),
        ("stop_token_ids", replace(GREEDY, stop_token_ids=(3, beyond))),
    ):
        with pytest.raises(UnsupportedByModel, match=f"sampling.{field}: token {beyond}"):
            await answer(engine, request("a", sampling=sampling))


PENALTIES = (
    {"frequency_penalty": 1.2, "presence_penalty": 0.7},
    {"repetition_penalty": 1.6},
    {"frequency_penalty": -0.4},
)


@pytest.mark.parametrize("penalties", PENALTIES)
async def test_a_reply_with_penalties_resumes_at_any_token(make: Make, penalties: dict[str, Any]) -> None:
    """The penalties behind a resumed part are those of the whole reply, and the reply is another one than without them."""
    engine = await make()
    for sampling in repeatable(engine):
        plain = await answer(engine, request("plain", QUESTIONS[3], sampling))
        common = max(plain.tokens, key=plain.tokens.count)
        penalized = replace(sampling, **penalties, logit_bias={common: -3.0, common + 1: 2.5})
        whole = await answer(engine, request("whole", QUESTIONS[3], penalized))
        assert whole.tokens != plain.tokens
        for cut in (1, 9, len(whole.tokens) - 1):
            resumed = request(f"r{cut}", QUESTIONS[3], penalized, resume_token_ids=whole.tokens[:cut])
            assert (await answer(engine, resumed)).tokens == whole.tokens[cut:]


async def test_logprobs_come_with_every_token_where_asked_for(make: Make) -> None:
    engine = await make()
    needs(engine, Capability.LOGPROBS)
    assert (await answer(engine, request("a"))).logprobs == ()
    got = await answer(engine, request("b", sampling=replace(GREEDY, top_logprobs=3)))
    assert [p.chosen.token_id for p in got.logprobs] == list(got.tokens)
    for position in got.logprobs:
        assert len(position.top) == 3
        assert [t.logprob for t in position.top] == sorted((t.logprob for t in position.top), reverse=True)
        assert position.top[0].token_id == position.chosen.token_id  # greedy
        assert position.chosen.logprob <= 0
    none = await answer(engine, request("c", sampling=replace(GREEDY, top_logprobs=0)))
    assert all(p.top == () for p in none.logprobs)


async def test_unsound_requests_are_refused_by_name(make: Make) -> None:
    engine = await make(max_context_tokens=64)
    with pytest.raises(PromptTooLong):
        await answer(engine, request("a", "x" * 100))
    too_large = TokenPrompt((engine.tokenizer.vocab_size,))
    with pytest.raises(InvalidRequest, match="token_ids"):
        await answer(engine, replace(request("b"), prompt=too_large))
    with pytest.raises(InvalidRequest, match="resume_token_ids"):
        await answer(engine, request("c", resume_token_ids=(1,) * 25))
    got = await answer(engine, replace(request("d", sampling=replace(GREEDY, max_tokens=500))))
    assert present(got.admitted).prompt_tokens + len(got.tokens) == 64
    assert len(got.tokens) == present(got.admitted).max_output_tokens


async def test_one_id_runs_once(make: Make) -> None:
    engine = await make()
    async with aclosing(engine.generate(request("a", sampling=ENDLESS))) as first:
        await anext(first)
        with pytest.raises(AlreadyRunning):
            await answer(engine, request("a"))


async def test_abort_ends_a_stream_and_frees_everything(make: Make) -> None:
    engine = await make()
    running = asyncio.create_task(answer(engine, request("a", sampling=ENDLESS)))
    await until(lambda: bool(engine.load().running_tokens))
    assert await engine.abort("a")
    got = await running
    assert present(got.finished).reason is FinishReason.ABORTED
    assert not await engine.abort("a")
    await until(lambda: engine.load().free_kv_blocks == engine.info.kv_blocks)


async def test_leaving_a_stream_aborts_within_a_step(make: Make) -> None:
    engine = await make()
    events = engine.generate(request("a", sampling=ENDLESS))
    async for event in events:
        if isinstance(event, TokenFrame):
            break
    await events.aclose()
    before = engine.steps
    assert not await engine.abort(
        "nobody"
    )  # commands are taken between steps: that of leaving was taken before this one
    assert engine.steps is None or engine.steps <= before + 1
    await until(lambda: engine.load().requests == 0 and engine.load().free_kv_blocks == engine.info.kv_blocks)


async def test_a_full_queue_refuses_with_a_time_to_come_again(make: Make) -> None:
    engine = await make(**NARROW, max_queued=1)
    there = [asyncio.create_task(answer(engine, request(name, sampling=ENDLESS))) for name in "abc"]
    await until(lambda: engine.load().requests == 3)
    with pytest.raises(Overloaded) as caught:
        await answer(engine, request("d"))
    assert caught.value.retry_after_s > 0
    for name in "abc":
        await engine.abort(name)
    await asyncio.gather(*there)


async def test_a_reply_resumes_at_any_token(make: Make) -> None:
    engine = await make()
    for sampling in (replace(GREEDY, stop=("zq",)), *repeatable(engine)):
        whole = await answer(engine, request("whole", sampling=sampling))
        for cut in (1, 7, len(whole.tokens) - 1):
            rest = await answer(engine, request(f"r{cut}", sampling=sampling, resume_token_ids=whole.tokens[:cut]))
            assert rest.tokens == whole.tokens[cut:]
            assert whole.text.endswith(rest.text)


async def test_a_reply_that_was_complete_is_finished_at_once(make: Make) -> None:
    engine = await make()
    ended = await answer(engine, request("a", QUESTIONS[1], SamplingParams(temperature=0.0, max_tokens=1500)))
    for sampling, tokens, reason in (
        (SamplingParams(temperature=0.0), ended.tokens, FinishReason.STOP),
        (GREEDY, (5,) * 24, FinishReason.LENGTH),
    ):
        steps = engine.steps
        got = await answer(engine, request("b", QUESTIONS[1], sampling, resume_token_ids=tokens))
        assert got.tokens == ()
        assert present(got.finished).reason is reason
        assert engine.steps == steps


async def test_a_prefix_is_known_to_requests_with_its_salt_only(make: Make) -> None:
    """The time to its first token tells nobody what was sent with another salt, or without one."""
    engine = await make()
    needs(engine, Capability.PREFIX_REUSE)
    cached, tokens = list[int](), set[tuple[int, ...]]()
    for i, salt in enumerate(("", "a", "b", "a", "", "b")):
        got = await answer(engine, request(f"r{i}", "Sort: " + "7, 3, " * 30, cache_salt=salt))
        cached.append(present(got.finished).usage.cached_prompt_tokens)
        tokens.add(tuple(got.tokens))
    assert cached[:3] == [0, 0, 0]
    assert min(cached[3:]) > 0
    assert len(tokens) == 1


def all_have_begun(scheduler: BatchScheduler) -> bool:
    return all(s.output_tokens for s in (*scheduler.running, *scheduler.waiting))


async def one_after_the_other_begins(engine: Any, asked: list[GenerationRequest]) -> list[asyncio.Task[Got]]:
    """Replies under way at once, each asked for when the one before has its first token: none was foreseen by the others.

    An engine of our own is held back until all have begun, however slow this process is.
    """
    release = held(engine, all_have_begun) if isinstance(engine, LoopEngine) else lambda: None
    tasks = []
    for r in asked:
        begun = asyncio.Event()

        async def reply(r: GenerationRequest = r, begun: asyncio.Event = begun) -> AsyncIterator[Any]:
            async with aclosing(engine.generate(r)) as events:
                async for event in events:
                    if isinstance(event, TokenFrame):
                        begun.set()
                    yield event

        tasks.append(asyncio.create_task(collect(reply())))
        await begun.wait()
    release()
    return tasks


async def test_preemption_changes_nothing_but_the_time(make: Make) -> None:
    roomy, tight = await make(), await make(kv_tokens=176, kv_block_tokens=4)
    # long replies, of which nobody can say beforehand that they will be; three have room for their prompts
    sampling = SamplingParams(temperature=0.0, max_tokens=100)
    asked = [request(f"r{i}", f"Count from {(2, 3, 5)[i % 3]} to 99 by 2.", sampling) for i in range(12)]
    wanted = [got.tokens for got in await asyncio.gather(*(answer(roomy, r) for r in asked))]
    tasks = await one_after_the_other_begins(tight, asked[:3])
    tasks += [asyncio.create_task(answer(tight, r)) for r in asked[3:]]
    found = await asyncio.gather(*tasks)
    assert [got.tokens for got in found] == wanted
    assert tight.preemptions > 0
    assert sum(got.finished.preemptions for got in found if got.finished is not None) == tight.preemptions
    assert roomy.preemptions == 0


async def test_the_load_tells_who_runs_and_who_waits(make: Make) -> None:
    engine = await make(**NARROW)
    tasks = [asyncio.create_task(answer(engine, request(f"r{i}", sampling=ENDLESS))) for i in range(3)]
    assert engine.load().output_tokens_per_s == 0.0  # a warm-up is nobody's request
    await until(lambda: len(engine.load().running_tokens) == 2 and engine.load().output_tokens_per_s > 0)
    load = engine.load()
    assert len(load.running_tokens) == 2
    assert len(load.queued_tokens) == 1
    await until(lambda: engine.load().free_kv_blocks < engine.info.kv_blocks)
    for i in range(3):
        await engine.abort(f"r{i}")
    await asyncio.gather(*tasks)


async def test_the_higher_priority_goes_first(make: Make) -> None:
    """Two requests run; behind the one that goes on, the waiting ones run one by one."""
    engine = await make(**NARROW)
    needs(engine, Capability.PRIORITIES)
    order: list[str] = []

    async def one(name: str, priority: int) -> None:
        await answer(engine, request(name, priority=priority))
        order.append(name)

    blockers = [asyncio.create_task(answer(engine, request(name, sampling=ENDLESS))) for name in ("b0", "b1")]
    await until(lambda: len(engine.load().running_tokens) == 2)
    tasks = []
    for i, priority in enumerate((0, -3, 9)):
        tasks.append(asyncio.create_task(one(f"p{priority}", priority)))
        while len(engine.load().queued_tokens) <= i:
            await asyncio.sleep(0.001)
    await engine.abort("b0")
    await asyncio.gather(*tasks)
    assert order == ["p9", "p0", "p-3"]
    assert not blockers[1].done()  # there was one place all along
    await engine.abort("b1")
    await asyncio.gather(*blockers)


async def test_closing_ends_every_stream(make: Make) -> None:
    engine = await make()
    running = asyncio.create_task(answer(engine, request("a", sampling=ENDLESS)))
    await until(lambda: bool(engine.load().running_tokens))
    await engine.close()
    got = await running
    assert present(got.finished).reason is FinishReason.ABORTED
    with pytest.raises(Unavailable):
        await answer(engine, request("b"))


async def test_text_and_token_prompts_are_continued_as_they_stand(make: Make) -> None:
    engine = await make()
    text = await answer(engine, replace(request("a"), prompt=TextPrompt("abc")))
    ids = tuple(engine.tokenizer.encode(TextPrompt("abc")))
    tokens = await answer(engine, replace(request("b"), prompt=TokenPrompt(ids)))
    assert text.tokens == tokens.tokens


async def test_kv_moves_to_another_engine_while_the_reply_is_made(make: Make) -> None:
    source, target = await make(), await make()
    needs(source, Capability.KV_TRANSFER)
    for i, kind in enumerate((GREEDY, SAMPLED)):
        asked = request("r", QUESTIONS[3], replace(kind, max_tokens=200))
        whole = await answer(source, asked)
        release = waits_at(source, len(whole.tokens) - 3)
        said, nine, left = list[int](), asyncio.Event(), list[int]()

        async def read(asked: GenerationRequest, said: list[int], nine: asyncio.Event, left: list[int]) -> None:
            async for event in source.generate(asked):
                if isinstance(event, TokenFrame):
                    said += event.token_ids
                    if len(said) >= 9:
                        nine.set()
                elif isinstance(event, HandedOver):
                    left.append(event.offset)

        reading = asyncio.create_task(read(asked, said, nine, left))
        await nine.wait()
        stopped, present, last = await move(source, target, "r", "t")
        steps, before = source.steps, target.steps
        offset = len(said)  # what was computed was handed out when it was stopped
        enter = partial(target.enter, "t", asked, stopped.tokens, last)
        rest = await collect(enter() if kind is GREEDY else iterated(enter), offset)
        assert source.steps == steps
        assert (await source.leave("r")).offset == offset
        release()
        await reading
        assert left == [offset]
        assert tuple(said) + rest.tokens == whole.tokens
        assert target.steps - before == len(rest.tokens)  # not a token of the prefix was computed again
        assert (present > 0) == (i > 0)  # the second time the prompt's blocks were there already
    await nothing_held(source)
    await nothing_held(target)


async def test_a_stopped_request_that_does_not_leave_goes_on_unchanged(make: Make) -> None:
    source, target = await make(), await make()
    needs(source, Capability.KV_TRANSFER)
    asked = request("r", QUESTIONS[3], replace(GREEDY, max_tokens=200))
    whole = await answer(source, asked)
    let_go = waits_at(source, len(whole.tokens) - 3)
    said, moved = list[int](), False
    async for event in source.generate(asked):
        if isinstance(event, TokenFrame):
            said += event.token_ids
            if len(said) >= 5 and not moved:
                moved = True
                await move(source, target, "r", "t")
                await target.release("t")
                await source.resume("r")
                let_go()
    assert tuple(said) == whole.tokens
    await nothing_held(target)


async def test_a_stopped_request_can_be_aborted(make: Make) -> None:
    engine = await make()
    needs(engine, Capability.KV_TRANSFER)
    waits_at(engine, 100)
    async for event in engine.generate(request("r", sampling=ENDLESS)):
        if isinstance(event, TokenFrame) and event.offset == 20:
            await engine.pause("r", 0)
            assert await engine.abort("r")
        last = event
    assert isinstance(last, EngineFinished)
    assert last.reason is FinishReason.ABORTED
    with pytest.raises(NotFound):
        await engine.leave("r")
    await engine.resume("r")
    await nothing_held(engine)


async def test_kv_that_does_not_fit_is_refused(make: Make) -> None:
    engine = await make()
    needs(engine, Capability.KV_TRANSFER)
    other = await make(kv_block_tokens=8)
    asked = request("a", sampling=ENDLESS)
    waits_at(engine, 100)
    async with aclosing(engine.generate(asked)) as events:
        async for event in events:
            if isinstance(event, TokenFrame) and event.offset > 20:
                break
        tokens = await engine.computed_tokens("a")
        with pytest.raises(InvalidRequest, match="layout"):
            await other.reserve("t", engine.kv_layout, tokens)
        with pytest.raises(InvalidRequest, match="layout"):
            await engine.reserve("t", replace(engine.kv_layout, model_digest="another"), tokens)
        with pytest.raises(InvalidRequest, match="full ones"):
            await engine.read_kv("a", 0, 1000)
        with pytest.raises(InvalidRequest, match="first_block"):
            await engine.pause("a", 1000)
        for wrong in (engine.computed_tokens("b"), engine.read_kv("b", 0, 1), engine.pause("b", 0), engine.leave("b")):
            with pytest.raises(NotFound):
                await wrong
        present = await engine.reserve("t", engine.kv_layout, tokens)
        assert present == len(tokens) // 16  # its own blocks
        with pytest.raises(AlreadyRunning):
            await engine.reserve("t", engine.kv_layout, tokens)
        data = await engine.read_kv("a", 0, 1)
        with pytest.raises(InvalidRequest, match="present already"):
            await engine.write_kv("t", 0, data)
        with pytest.raises(Overloaded, match="blocks"):
            await engine.write_kv("t", engine.info.kv_blocks, data)
        for first, problem in ((0, InvalidRequest), (engine.info.kv_blocks, Overloaded)):
            with pytest.raises(problem):
                await collect(engine.enter("t", request("c", sampling=ENDLESS), tokens, LastBlocks(first, data)))
            with pytest.raises(NotFound):
                await engine.write_kv("t", 0, data)
            await engine.reserve("t", engine.kv_layout, tokens)
        with pytest.raises(InvalidRequest, match="token_ids"):  # not as many blocks as tokens
            await collect(engine.enter("t", request("c", sampling=ENDLESS), (*tokens, *range(1, 200))))
        with pytest.raises(NotFound):  # the reservation is gone
            await collect(engine.enter("t", request("c", sampling=ENDLESS), tokens))
        await engine.reserve("t", engine.kv_layout, tokens)
        with pytest.raises(InvalidRequest, match="prompt"):
            await collect(engine.enter("t", request("c", "another", ENDLESS), tokens))
        await engine.release("t")
    await nothing_held(engine)


async def test_reserved_room_is_only_what_is_idle(make: Make) -> None:
    needs(await make(), Capability.KV_TRANSFER)
    engine = await make(kv_tokens=96, kv_block_tokens=16, max_context_tokens=96)
    await engine.reserve("t", engine.kv_layout, range(1, 70))  # 5 of 6 blocks
    with pytest.raises(Overloaded, match="blocks"):
        await engine.reserve("u", engine.kv_layout, range(100, 130))
    await engine.release("t")
    await engine.release("t")
    assert await engine.reserve("u", engine.kv_layout, range(100, 130)) == 0
    await engine.release("u")


def test_block_bytes_are_the_size_of_exported_blocks() -> None:
    layout = KvLayout("d", 2, 2, 16, 4, "float32")
    assert layout.block_bytes == np.zeros((1, 2, 2, 4, 2, 16), np.float32).nbytes
