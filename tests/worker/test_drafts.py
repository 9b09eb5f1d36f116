"""Drafts of requests, in both engines: the reply is the one without a draft, in fewer passes, whatever the draft is."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.services.text_threads import INLINE_CHARACTERS
from penstock.types.prompts import TextPrompt
from penstock.types.replies import FinishReason
from penstock.types.requests import MAX_DRAFT_CHARS, MAX_DRAFT_TOKENS, Draft, GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.workers import EngineFinished
from penstock.worker_service.speculation.windows import FIRST_SHARE, row_price
from tests.support.engines import (
    GREEDY,
    QUESTIONS,
    SAMPLED,
    Got,
    Make,
    answer,
    engines_of,
    move,
    request,
    started,
    until,
)
from tests.support.held_steps import held
from tests.support.present import present
from tests.worker.test_failing_requests import of_nothing

LONG = 64


@pytest.fixture(params=("torch", "simulated"))
async def start(request: pytest.FixtureRequest, gguf_family: Callable[[str], Path]) -> AsyncIterator[Make]:
    async with engines_of(request, gguf_family) as build:
        yield build


def drafted(asked: GenerationRequest, draft: Draft) -> GenerationRequest:
    return replace(asked, draft=draft)


def changed(tokens: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """The tokens with some replaced, left out, and put in."""
    rng, result = random.Random(seed), list[int]()
    for token in tokens:
        match rng.randrange(12):
            case 0:
                result.append(rng.randrange(97, 123))
            case 1:
                pass
            case 2:
                result += [rng.randrange(97, 123), token]
            case _:
                result.append(token)
    return tuple(result)


@pytest.mark.parametrize("kind", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_no_draft_changes_a_reply(start: Make, kind: SamplingParams) -> None:
    """Neither its tokens nor its text nor its logprobs: the right answer, parts of it, others, nonsense; many at once."""
    engine = await start()
    sampling = replace(kind, max_tokens=LONG, top_logprobs=2)
    asked = [request(f"r{i}", question, sampling) for i, question in enumerate(QUESTIONS)]
    plain = [await answer(engine, each) for each in asked]
    digest = engine.tokenizer.digest
    rng = random.Random(3)
    drafts = [
        *(Draft("", got.tokens, digest) for got in plain),
        *(Draft("", changed(got.tokens, seed), digest) for seed, got in enumerate(plain)),
        *(Draft(got.text or "x") for got in plain),
        *(Draft("", plain[-1 - i].tokens, digest) for i in range(len(plain))),
        *(Draft("", tuple(rng.choices(range(2**31 - 1), k=50)), digest) for _ in plain),
        *(Draft("", tuple(rng.choices(sorted(engine.tokenizer.eos_ids), k=50)), digest) for _ in plain),
    ]
    requests = [replace(drafted(asked[i % len(asked)], draft), request_id=f"d{i}") for i, draft in enumerate(drafts)]
    for i, got in enumerate(await asyncio.gather(*(answer(engine, each) for each in requests))):
        expected = plain[i % len(plain)]
        assert (got.tokens, got.text) == (expected.tokens, expected.text)
        for ours, theirs in zip(got.logprobs, expected.logprobs, strict=True):
            assert ours.chosen.logprob == pytest.approx(theirs.chosen.logprob, abs=1e-3)


async def test_the_right_answer_takes_few_passes_and_is_counted(start: Make) -> None:
    """As tokens and as text. All tokens but one of each pass are accepted draft tokens; without a draft none are."""
    engine = await start()
    asked = request("r", QUESTIONS[3], replace(GREEDY, max_tokens=LONG))
    plain = await answer(engine, asked)
    usage = present(plain.finished).usage
    assert (usage.accepted_draft_tokens, usage.rejected_draft_tokens) == (0, 0)
    for draft in (Draft("", plain.tokens, engine.tokenizer.digest), Draft(plain.text)):
        before = engine.steps
        got = await answer(engine, drafted(asked, draft))
        assert got.tokens == plain.tokens
        passes, usage = engine.steps - before, present(got.finished).usage
        assert passes <= LONG // 5
        assert LONG - passes <= usage.accepted_draft_tokens < LONG
        assert usage.rejected_draft_tokens <= usage.accepted_draft_tokens


async def test_a_draft_that_cannot_be_used_is_ignored(start: Make) -> None:
    """Tokens of another tokenizer, and a text that cannot be encoded: the request is served as without a draft."""
    engine = await start()
    asked = request("r", QUESTIONS[3])
    plain = await answer(engine, asked)

    def check(got: Got) -> None:
        usage = present(got.finished).usage
        assert (got.tokens, got.text) == (plain.tokens, plain.text)
        assert (usage.accepted_draft_tokens, usage.rejected_draft_tokens) == (0, 0)

    check(await answer(engine, drafted(asked, Draft("", plain.tokens, "another"))))

    def panics(text: str) -> list[int]:
        raise KeyboardInterrupt(text)  # what a panic in native code looks like: no Exception

    engine.tokenizer.encode_text = panics
    check(await answer(engine, drafted(asked, Draft(plain.text))))


async def test_a_resumed_reply_goes_on_in_its_draft(start: Make) -> None:
    """It gets the whole draft, and continues behind its tokens in few passes."""
    engine = await start()
    asked = request("r", QUESTIONS[3], replace(GREEDY, max_tokens=LONG))
    plain = await answer(engine, asked)
    draft = Draft("", plain.tokens, engine.tokenizer.digest)
    for resumed in (1, 20, LONG - 1):
        before = engine.steps
        got = await answer(engine, drafted(replace(asked, resume_token_ids=plain.tokens[:resumed]), draft))
        assert got.tokens == plain.tokens[resumed:]
        assert engine.steps - before <= LONG // 5


async def test_a_reply_that_moves_takes_its_draft_along(start: Make) -> None:
    source, target = await start(), await start()
    asked = request("r", QUESTIONS[3], replace(GREEDY, max_tokens=200))
    plain = await answer(source, asked)
    draft = Draft("", (*plain.tokens[:9], 33, 33, *plain.tokens[11:]), source.tokenizer.digest)
    held(source, lambda scheduler: (r := scheduler.get("r")) is not None and r.output_tokens >= 9)
    seen = list[int]()

    async def read() -> None:
        async for event in source.generate(drafted(asked, draft), lambda frame: seen.extend(frame.token_ids)):
            assert not isinstance(event, EngineFinished)

    reading = asyncio.create_task(read())
    async with asyncio.timeout(120):
        await until(lambda: len(seen) >= 9)
    stopped, _, last = await move(source, target, "r", "t")
    offset, before = stopped.output_tokens, target.steps
    rest = [event async for event in target.enter("t", drafted(asked, draft), stopped.tokens, last)]
    await source.leave("r")
    await reading
    finished = rest[-1]
    assert isinstance(finished, EngineFinished)
    tokens = tuple(token for event in rest[1:-1] for token in event.token_ids)
    assert tuple(seen[:offset]) + tokens == plain.tokens
    assert target.steps - before <= (len(plain.tokens) - offset) // 3 + 1
    assert finished.usage.accepted_draft_tokens > 0


async def test_a_request_can_be_aborted_while_its_draft_is_encoded() -> None:
    """A long draft is encoded and indexed on another thread."""
    encoding, go_on = threading.Event(), threading.Event()
    async with started(of_nothing()) as engine:
        encode = engine.tokenizer.encode_text

        def held(text: str) -> list[int]:
            encoding.set()
            go_on.wait()
            return encode(text)

        engine.tokenizer.encode_text = held  # type: ignore[method-assign]
        asked = drafted(request("r", QUESTIONS[0]), Draft("a" * (INLINE_CHARACTERS + 1)))
        reading = asyncio.create_task(answer(engine, asked))
        assert await asyncio.to_thread(encoding.wait, 120)
        assert await engine.abort("r")
        go_on.set()
        assert present((await reading).finished).reason is FinishReason.ABORTED
        assert engine._core.idle


async def test_a_row_costs_as_much_as_the_batch_makes_it(start: Make) -> None:
    """The price at which proposals are cut is that of the replies that run now."""
    engine = await start()
    asked = replace(GREEDY, max_tokens=500)
    release = held(engine, lambda s: len(s.running) == 4 or len(s.running) + len(s.waiting) < 4)
    replies = [asyncio.create_task(answer(engine, request(f"r{i}", QUESTIONS[i], asked))) for i in range(4)]
    async with asyncio.timeout(120):
        await until(lambda: len(engine._core.scheduler.running) == 4)
    assert engine._row_price() == row_price(4, FIRST_SHARE)
    release()
    await asyncio.gather(*replies)
    assert engine._row_price() == row_price(0, FIRST_SHARE)


async def test_a_finished_request_leaves_no_source(start: Make) -> None:
    """Whether it ends, is aborted, or was complete before it began."""
    engine = await start()
    asked = request("r", QUESTIONS[0], replace(GREEDY, max_tokens=4))
    plain = await answer(engine, asked)
    draft = Draft("", plain.tokens, engine.tokenizer.digest)
    await answer(engine, drafted(asked, draft))
    await answer(engine, drafted(replace(asked, resume_token_ids=plain.tokens), draft))
    endless = drafted(request("e", QUESTIONS[0], replace(GREEDY, max_tokens=1500)), draft)
    async for _ in engine.generate(endless):
        break
    await until(lambda: engine._core.idle)
    assert not engine._core.proposals._sources


@pytest.mark.parametrize(
    ("draft", "fields"),
    [
        (Draft(), ["draft"]),
        (Draft("a" * (MAX_DRAFT_CHARS + 1)), ["draft.text"]),
        (Draft("", (1,) * (MAX_DRAFT_TOKENS + 1), "d"), ["draft.token_ids.ids"]),
        (Draft("", (2**31,), "d"), ["draft.token_ids.ids"]),
        (Draft("", (1,)), ["draft.tokenizer_digest"]),
        (Draft("a", (), "d"), ["draft.tokenizer_digest"]),
        (Draft("", (1,), "d" * 129), ["draft.tokenizer_digest"]),
    ],
)
def test_what_is_wrong_with_a_draft_is_refused_by_name(draft: Draft, fields: list[str]) -> None:
    request = GenerationRequest("r", TextPrompt("hello"), GREEDY, draft=draft)
    assert [problem.field for problem in request.problems()] == fields
