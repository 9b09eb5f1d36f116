"""Prompts of any length: those that cannot fit are not tokenized, and long ones are tokenized off the event loop."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.services.domain.errors import (
    AlreadyRunning,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestFailed,
    Unavailable,
)
from penstock.services.text_threads import TextThread
from penstock.types.prompts import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from penstock.types.replies import FinishReason
from penstock.types.requests import GenerationRequest
from penstock.types.workers import EngineFinished, TransferAccepted, TransferOpening
from penstock.worker_service.engine.loop import LoopEngine
from penstock.worker_service.engine.sglang.engine import SglangEngine
from penstock.worker_service.migration.receiver import IncomingReply
from penstock.worker_service.migration.target import SourceLost
from penstock.worker_service.text.hf import HfTokenizer
from tests.conftest import FAMILY
from tests.support.engines import GREEDY, answer, collect, started
from tests.support.present import present
from tests.worker.test_failing_requests import assert_nothing_is_held, engine, of_nothing, of_torch

__all__ = ["engine"]

LONG = "Sort: 7, 3, 12. " * 1_000  # 16,000 characters: by its length alone it may fit, by its tokens it does not
HUGE = "x" * 2_000_000


def text(name: str, content: str = LONG) -> GenerationRequest:
    return GenerationRequest(name, TextPrompt(content), GREEDY)


def chat(name: str, content: str = LONG) -> GenerationRequest:
    return GenerationRequest(name, ChatPrompt((ChatMessage("user", content),)), GREEDY)


class Tokenizing:
    """Watches an engine's tokenizer: on which threads it works; `go_on` cleared, it waits there."""

    def __init__(self, engine: LoopEngine | SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[int] = []
        self.tokenized: list[int] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        tokenizer: Any = engine.tokenizer
        encode = tokenizer.encode

        def watched(prompt: Any, context_tokens: int | None = None) -> Any:
            self.threads.append(threading.get_ident())
            self.begun.set()
            self.go_on.wait()
            return encode(prompt, context_tokens)

        monkeypatch.setattr(tokenizer, "encode", watched)
        if isinstance(tokenizer, HfTokenizer):
            monkeypatch.setattr(tokenizer, "_backend", _Watched(tokenizer._backend, self.tokenized))


class _Watched:
    """A tokenizer's backend; how long the texts were that it tokenized."""

    def __init__(self, backend: Any, tokenized: list[int]) -> None:
        self._backend, self._tokenized = backend, tokenized

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self._tokenized.extend(map(len, texts))
        return self._backend.encode_batch_fast(texts, **options)


@pytest.fixture
async def torch_engine() -> AsyncIterator[LoopEngine]:
    async with started(of_torch()) as made:
        yield made


async def test_what_cannot_fit_is_refused_without_being_tokenized(
    torch_engine: LoopEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text at once, a chat when its template has written it out, which no event loop waits for."""
    watch = Tokenizing(torch_engine, monkeypatch)
    for asked in (text("t", HUGE), chat("c", HUGE)):
        with pytest.raises(PromptTooLong, match="characters leave no room"):
            await answer(torch_engine, asked)
    assert watch.tokenized == []
    assert threading.get_ident() not in watch.threads
    assert_nothing_is_held(torch_engine)


async def test_long_prompts_are_tokenized_on_another_thread(
    torch_engine: LoopEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they are, the loop goes on: a short request that comes behind long ones is answered first."""
    watch = Tokenizing(torch_engine, monkeypatch)
    watch.go_on.clear()
    long = [asyncio.create_task(answer(torch_engine, make(f"{i}"))) for i, make in enumerate((text, chat, text))]
    await asyncio.to_thread(watch.begun.wait)
    assert threading.get_ident() not in watch.threads
    release = threading.Timer(30.0, watch.go_on.set)  # so that a failure is no hang
    release.start()
    monkeypatch.undo()
    short = await answer(torch_engine, text("short", "7 + 5"))
    assert short.finished is not None
    assert not any(task.done() for task in long)
    watch.go_on.set()
    release.cancel()
    for found in await asyncio.gather(*long, return_exceptions=True):
        assert isinstance(found, PromptTooLong)


async def test_short_prompts_are_tokenized_where_they_come(engine: LoopEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A way to a thread and back would cost more."""
    watch = Tokenizing(engine, monkeypatch)
    await answer(engine, text("short", "7 + 5"))
    with pytest.raises(PromptTooLong):
        await answer(engine, GenerationRequest("ids", TokenPrompt((65,) * 100_000), GREEDY))
    assert watch.threads == [threading.get_ident()] * 2


async def test_a_request_that_leaves_while_it_waits_is_never_tokenized(
    torch_engine: LoopEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the one whose deadline passed nor the one that was cancelled; nothing of them is left behind."""
    watch = Tokenizing(torch_engine, monkeypatch)
    watch.go_on.clear()
    first = asyncio.create_task(answer(torch_engine, text("first")))
    await asyncio.to_thread(watch.begun.wait)
    cancelled = asyncio.create_task(answer(torch_engine, text("cancelled")))
    late = asyncio.create_task(asyncio.wait_for(answer(torch_engine, text("late")), 0.01))
    with pytest.raises(TimeoutError):
        await late
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    watch.go_on.set()
    with pytest.raises(PromptTooLong):
        await first
    with pytest.raises(PromptTooLong):
        await answer(torch_engine, text("cancelled"))  # its name is free again
    assert len(watch.threads) == 2
    assert not torch_engine._encoder._pending
    assert_nothing_is_held(torch_engine)


async def test_a_request_can_be_aborted_while_it_is_tokenized(
    engine: LoopEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Tokenizing(engine, monkeypatch)
    watch.go_on.clear()
    asked = chat("r", "Sort: 7, 3. " * 500)
    events = asyncio.create_task(all_events(engine, asked))
    await asyncio.to_thread(watch.begun.wait)
    with pytest.raises(AlreadyRunning):
        await answer(engine, asked)
    assert await engine.abort("r")
    (end,) = await events
    assert isinstance(end, EngineFinished)
    assert end.reason is FinishReason.ABORTED
    watch.go_on.set()
    assert not await engine.abort("r")
    assert_nothing_is_held(engine)


async def all_events(engine: LoopEngine | SglangEngine, asked: GenerationRequest) -> list[Any]:
    return [event async for event in engine.generate(asked)]


async def test_replies_under_way_do_not_wait_behind_new_prompts(
    engine: LoopEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that goes on here, with tokens from elsewhere, is tokenized beside the prompts that came before it."""
    content = "Sort: 7, 3. " * 500
    watch = Tokenizing(engine, monkeypatch)
    watch.go_on.clear()
    new = asyncio.create_task(all_events(engine, chat("new", content)))
    await asyncio.to_thread(watch.begun.wait)
    watch.begun.clear()
    resumed = GenerationRequest("resumed", TextPrompt(content), GREEDY, resume_token_ids=(65, 66))
    going_on = asyncio.create_task(all_events(engine, resumed))
    await asyncio.to_thread(watch.begun.wait)
    assert len(set(watch.threads)) == 2
    watch.go_on.set()
    await asyncio.gather(new, going_on, return_exceptions=True)


async def test_a_move_that_ends_while_its_prompt_is_tokenized_leaves_no_reservation(
    engine: LoopEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Tokenizing(engine, monkeypatch)
    watch.go_on.clear()
    tokens = [65] * 40
    await engine.reserve("t", engine.kv_layout, tokens)

    entering = asyncio.create_task(collect(engine.enter("t", text("r", "7 + 5 " * 1_000), [*tokens, 65])))
    await asyncio.to_thread(watch.begun.wait)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    watch.go_on.set()
    await engine.abort("nobody")  # a command behind the release
    assert_nothing_is_held(engine)


async def test_the_prompt_of_a_request_that_moves_in_is_tokenized_while_its_kv_is_on_the_way(
    engine: LoopEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the closing, from which on the request is paused at its source; what is refused then keeps nothing."""
    watch = Tokenizing(engine, monkeypatch)
    incoming = IncomingReply(engine, "t", text("r", "7 + 5 " * 1_000), None)
    assert incoming.open()
    driving = asyncio.create_task(incoming.drive(TransferOpening("t", engine.kv_layout, tuple([65] * 40))))
    assert isinstance(await asyncio.wait_for(incoming.answers.get(), 60), TransferAccepted)
    assert await asyncio.to_thread(watch.begun.wait, 60), "without a closing"
    incoming.inbox.put_nowait(SourceLost())
    await asyncio.wait_for(driving, 60)
    with pytest.raises(Unavailable, match="ended the transfer"):
        await anext(incoming.events())
    assert_nothing_is_held(engine)
    await engine.reserve("u", engine.kv_layout, [65] * 40)
    await engine.prepare_entry("u", text("u", "7 + 5"))
    count = len(watch.threads)
    with pytest.raises(InvalidRequest, match="must begin with the prompt"):
        await collect(engine.enter("u", text("u", "7 + 5"), [65] * 41))
    assert len(watch.threads) == count, "not again at the hand-over"
    await engine.reserve("v", engine.kv_layout, [65] * 40)
    await engine.prepare_entry("v", text("v", "7 + 5"))
    await engine.release("v")
    assert not engine._encoder._ahead
    assert_nothing_is_held(engine)


async def test_a_tokenizer_that_fails_fails_its_request(engine: LoopEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OverflowError

    monkeypatch.setattr(engine.tokenizer, "encode", broken)
    for content in ("7 + 5", "7 + 5 " * 1_000):
        with pytest.raises(RequestFailed, match="OverflowError"):
            await answer(engine, chat("r", content))


async def test_an_engine_that_closes_ends_what_waits_for_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(of_nothing()) as engine:
        watch = Tokenizing(engine, monkeypatch)
        watch.go_on.clear()
        waiting = [asyncio.create_task(answer(engine, chat(f"r{i}"))) for i in range(2)]
        await asyncio.to_thread(watch.begun.wait)
        await asyncio.sleep(0)
    for found in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(found, Unavailable)
    watch.go_on.set()


async def test_what_waits_to_be_tokenized_is_bounded() -> None:
    """By its characters; the hint is the time that those before it take. Then there is room again."""
    thread, go_on = TextThread("test", max_waiting_characters=100), threading.Event()
    first = thread.submit(90, go_on.wait)
    with pytest.raises(Overloaded) as refused:
        thread.submit(11, go_on.wait)
    assert refused.value.retry_after_s >= 0.1
    second = thread.submit(10, go_on.wait)
    go_on.set()
    await asyncio.gather(first, second)
    assert await thread.submit(1_000, lambda: 7) == 7  # alone, a text of any length
    thread.close()
    with pytest.raises(Unavailable):
        thread.submit(1, lambda: 7)


async def test_a_template_that_fails_is_the_messages_fault(tmp_path: Path) -> None:
    """Whatever its code raises."""
    for template in ("{{ 1 / 0 }}", "{{ messages[9].content.x }}", "{{ raise_exception('no, ' + 'n' * 9000) }}"):
        backend = Tokenizer(models.BPE({"a": 0}, []))
        fast = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)
        fast.save_pretrained(str(tmp_path))
        with pytest.raises(InvalidRequest, match=r"prompt\.chat\.messages") as refused:
            HfTokenizer(tmp_path).encode(chat("r", "a").prompt)
        assert len(str(refused.value)) < 400


SPACES = " " * 40


def _byte_level(normalizer: Any = None, *, added: AddedToken | None = None, removes: bool = False) -> Tokenizer:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "ĠĠĠĠ", "th"]
    merges = [("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("t", "h")]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges))
    split = pre_tokenizers.Split(" ", "removed" if removes else "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level]) if removes else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if added is not None:
        tokenizer.add_tokens([added])
    return tokenizer


def _byte_fallback(*, complete: bool = True) -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256 if complete else 200)), "▁", "▁▁", "th"]
    merges = [("▁", "▁")]
    model = models.BPE(
        {p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


BOUNDED = {
    "byte-level": _byte_level(),
    "composing": _byte_level(normalizers.NFC()),
    "with-added": _byte_level(added=AddedToken("<tool_call>")),
    "byte-fallback": _byte_fallback(),
}
UNBOUNDED = {
    "strips": _byte_level(normalizers.Strip()),
    "drops-accents": _byte_level(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "shortens": _byte_level(normalizers.Replace("  ", " ")),
    "swallows-spaces": _byte_level(added=AddedToken("<end>", rstrip=True)),
    "removes-spaces": _byte_level(removes=True),
    "unknown-runs": _byte_fallback(complete=False),
    "words": Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
}


def _loaded(backend: Tokenizer, folder: Path) -> HfTokenizer:
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(str(folder))
    return HfTokenizer(folder)


@pytest.mark.parametrize("kind", BOUNDED)
def test_no_text_has_more_characters_than_its_tokens_can_stand_for(kind: str, tmp_path: Path) -> None:
    tokenizer, rng = _loaded(BOUNDED[kind], tmp_path), random.Random(9)
    parts = [SPACES, "th", "é", "ᾂ", "\u03b1\u0313\u0300\u0345", "🙂", "<tool_call>", "x", "\n"]
    for _ in range(300):
        content = "".join(rng.choices(parts, k=rng.randint(1, 12)))
        assert len(content) <= present(tokenizer.characters_per_token) * len(tokenizer.encode(TextPrompt(content)))


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_a_tokenizer_that_drops_text_has_no_such_bound(kind: str, tmp_path: Path) -> None:
    """Its prompts are tokenized before they are refused."""
    assert _loaded(UNBOUNDED[kind], tmp_path).characters_per_token is None


def test_shipped_models_have_the_bound() -> None:
    shipped = HfTokenizer(FAMILY / "large")
    assert len(LONG) < 2047 * present(shipped.characters_per_token) < len(HUGE)
