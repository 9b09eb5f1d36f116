"""The text of a reply does not depend on its being decoded token by token, for any tokens of any kind of tokenizer."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.types.prompts import TextPrompt
from penstock.worker_service.text.decoding import MAX_WINDOW_TOKENS
from penstock.worker_service.text.hf import HfTokenizer
from penstock.worker_service.text.reply import ReplyText
from penstock.worker_service.text.tokenizer import ByteTokenizer
from tests.conftest import FAMILY

SEQUENCES = 4_000
"""Of each kind; 20,000 take under a second more."""

WORDS = ["▁", "▁▁", "▁the", "▁a", "a", "b", "ing", "你", "é", "\N{REPLACEMENT CHARACTER}", "</s", "<0xG0>", "x▁y", "🙂"]
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_fallback(decoder: Any) -> Tokenizer:
    """Of the Llama 2 kind: pieces with ▁ for a space, and 256 byte tokens."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    model = models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    return tokenizer


def byte_level(decoder: Any) -> Tokenizer:
    """Of the GPT-2 kind, with added tokens that are text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL, *alphabet, "Ġthe", "âĤ", "âĤ¬", "ðŁ"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, []))
    tokenizer.decoder = decoder
    tokenizer.add_tokens(["<tool>", "你好", "é"])
    return tokenizer


def pieces_with(decoder: Any) -> Tokenizer:
    pieces = [*SPECIAL, *WORDS, "##s", "##ing", "un</w>", "do</w>", "."]
    tokenizer = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.decoder = decoder
    return tokenizer


LLAMA_2 = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
KINDS = {
    "llama-2": byte_fallback(LLAMA_2),
    "byte-fallback": byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])),
    "byte-level": byte_level(decoders.ByteLevel()),
    "byte-level-in-sequence": byte_level(decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])),
    "byte-level-and-more": byte_level(decoders.Sequence([decoders.ByteLevel(), decoders.Replace("z", "y")])),
    "metaspace": pieces_with(decoders.Metaspace()),
    "word-piece": pieces_with(decoders.WordPiece(cleanup=False)),
    "suffixes": pieces_with(decoders.BPEDecoder()),
}


def loaded(kind: str, folder: Path) -> HfTokenizer:
    backend = KINDS[kind]
    backend.add_special_tokens(SPECIAL)
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>").save_pretrained(str(folder))
    return HfTokenizer(folder, vocab_size=backend.get_vocab_size() + 3)  # a model may have more rows than tokens


def random_tokens(tokenizer: HfTokenizer, rng: random.Random) -> list[int]:
    """Bytes of real text, bytes of no text, pieces and special tokens, in runs."""
    tokens: list[int] = []
    for _ in range(rng.randint(1, 6)):
        match rng.randrange(4):
            case 0:
                tokens += [3 + byte for byte in rng.choice("é你🙂\n€").encode()]
            case 1:
                tokens += [3 + rng.randrange(256) for _ in range(rng.randint(1, 4))]
            case 2:
                tokens += [
                    rng.randrange(tokenizer.vocab_size - 20, tokenizer.vocab_size) for _ in range(rng.randint(1, 3))
                ]
            case _:
                tokens.append(rng.randrange(3))
    return [token % tokenizer.vocab_size for token in tokens]


@pytest.mark.parametrize("kind", KINDS)
def test_the_pieces_of_any_tokens_join_to_the_text_of_the_whole(kind: str, tmp_path: Path) -> None:
    """What is told is never taken back: after every token the text so far begins that of the whole."""
    tokenizer, rng = loaded(kind, tmp_path), random.Random(11)
    for _ in range(SEQUENCES):
        tokens = random_tokens(tokenizer, rng)
        text, said, expected = ReplyText(tokenizer), "", tokenizer.decode(tokens)
        for token in tokens:
            said += text.push(token)
            assert expected.startswith(said), tokens
        assert said + text.finish() == expected, tokens


def test_only_what_a_later_token_can_change_waits(tmp_path: Path) -> None:
    """Words are told at once, a character of several bytes with the token behind its last."""
    tokenizer = loaded("llama-2", tmp_path)
    ids = tokenizer._backend.token_to_id
    tokens = [ids("▁the"), ids("▁a"), *(3 + byte for byte in "你".encode()), ids("b")]
    text = ReplyText(tokenizer)
    assert [text.push(token) for token in tokens] == ["the", " a", "", "", "", "你b"]


def counted(tokenizer: HfTokenizer) -> list[int]:
    """How many tokens each decode will have seen."""
    decode, decoded = tokenizer.decode, list[int]()

    def counting(token_ids: Any) -> str:
        decoded.append(len(token_ids))
        return decode(token_ids)

    tokenizer.decode = counting  # type: ignore[method-assign]
    return decoded


def test_each_token_costs_what_it_adds_however_long_the_reply(tmp_path: Path) -> None:
    """No decode sees more than the run that it ends: counted, not timed."""
    tokenizer = loaded("llama-2", tmp_path)
    decoded = counted(tokenizer)
    rng, stream = random.Random(5), tokenizer.stream()
    words = [3 + 256 + rng.randrange(len(WORDS)) for _ in range(4_000)]
    for token in words:
        stream(token)
    assert max(decoded) <= 8
    for token in [*(3 + rng.randrange(256) for _ in range(4_000)), *words[:10]]:
        stream(token)
    assert sum(decoded) < 4 * (len(words) + 4_000)


@pytest.mark.parametrize(("kind", "first_word"), [("llama-2", len(SPECIAL) + 256), ("metaspace", len(SPECIAL))])
def test_a_reply_of_blanks_costs_no_more_for_each_token(kind: str, first_word: int, tmp_path: Path) -> None:
    """A blank at the start has no text, so that a window of them grows: it is shortened. Counted, not timed."""
    tokenizer = loaded(kind, tmp_path)
    decode = tokenizer.decode
    blank, word = (first_word + WORDS.index(piece) for piece in ("▁", "▁the"))
    assert (decode([blank]), decode([blank, blank]), decode([word])) == ("", " ", "the")
    decoded = counted(tokenizer)
    tokens = [*[blank] * 1_000, word, *[blank] * 200, word]
    stream = tokenizer.stream()
    assert "".join(map(stream, tokens)) == decode(tokens)
    assert max(decoded) <= MAX_WINDOW_TOKENS + 2


def test_token_bytes_of_a_byte_token_are_that_byte(tmp_path: Path) -> None:
    tokenizer = loaded("llama-2", tmp_path)
    assert b"".join(tokenizer.token_bytes(3 + byte) for byte in "你".encode()) == "你".encode()


BYTES = ByteTokenizer()
SHIPPED = HfTokenizer(FAMILY / "small")
TOKENIZERS: tuple[ByteTokenizer | HfTokenizer, ...] = (BYTES, SHIPPED)


def whole(tokenizer: ByteTokenizer | HfTokenizer, tokens: list[int], stop: tuple[str, ...] = ()) -> str:
    text = ReplyText(tokenizer, stop)
    return "".join([text.push(token) for token in tokens] + [text.finish()])


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_whole_text(tokenizer: ByteTokenizer | HfTokenizer, data: st.DataObject) -> None:
    """Any tokens at all, also those that are no UTF-8."""
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    assert whole(tokenizer, tokens) == tokenizer.decode(tokens)


@settings(max_examples=100, deadline=None)
@given(st.text(min_size=1, max_size=20))
def test_text_survives_the_shipped_tokenizer(text: str) -> None:
    assert whole(SHIPPED, SHIPPED.encode(TextPrompt(text))) == text


@settings(max_examples=100, deadline=None)
@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_reply_ends_before_its_first_stop_string(text: str, stops: list[str]) -> None:
    starts = [at for stop in stops if (at := text.find(stop)) >= 0]
    reply = ReplyText(BYTES, stops)
    said = ""
    for token in text.encode():
        said += reply.push(token)
        assert not any(stop in said for stop in stops)
    said += reply.finish()
    # the first to be complete ends the reply; of those complete with the same token, the one that begins first
    ends = sorted((text.find(s) + len(s), text.find(s)) for s in stops if s in text)
    assert said == (text[: ends[0][1]] if starts else text)
    assert (reply.stopped_by is not None) == bool(starts)


@settings(max_examples=80, deadline=None)
@given(st.text("ab€", max_size=16), st.integers(0, 48), st.sampled_from([(), ("ab",), ("b€", "aa")]))
def test_a_resumed_reply_goes_on_with_the_very_next_character(text: str, cut: int, stop: tuple[str, ...]) -> None:
    tokens = list(text.encode())
    cut = min(cut, len(tokens))
    first, second = ReplyText(BYTES, stop), ReplyText(BYTES, stop)
    said = "".join(first.push(token) for token in tokens[:cut])
    for token in tokens[:cut]:
        second.push(token)
    said += "".join([second.push(token) for token in tokens[cut:]] + [second.finish()])
    assert said == whole(BYTES, tokens, stop)


def test_token_bytes_are_the_bytes(tmp_path: Path) -> None:
    ids = SHIPPED.encode(TextPrompt("a€"))
    assert b"".join(SHIPPED.token_bytes(t) for t in ids) == "a€".encode()
    assert SHIPPED.token_bytes(257) == b""  # the end of a reply is no text
