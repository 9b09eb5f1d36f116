"""Text of a reply: nothing lost, nothing after a stop string, and the same wherever it is cut and resumed."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.worker_service.text import ByteTokenizer, ReplyText, Tokenizer
from penstock.worker_service.text.hf import HfTokenizer
from tests.conftest import FAMILY

BYTES = ByteTokenizer()
SHIPPED = HfTokenizer(FAMILY / "small")
TOKENIZERS: tuple[Tokenizer, ...] = (BYTES, SHIPPED)


def whole(tokenizer: Tokenizer, tokens: list[int], stop: tuple[str, ...] = ()) -> str:
    text = ReplyText(tokenizer, stop)
    return "".join([text.push(token) for token in tokens] + [text.finish()])


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_whole_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Any tokens at all, also those that are no UTF-8."""
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    assert whole(tokenizer, tokens) == tokenizer.decode(tokens)


@settings(max_examples=100, deadline=None)
@given(st.text(min_size=1, max_size=20))
def test_text_survives_the_shipped_tokenizer(text: str) -> None:
    from penstock.types.prompts import TextPrompt

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
    from penstock.types.prompts import TextPrompt

    ids = SHIPPED.encode(TextPrompt("a€"))
    assert b"".join(SHIPPED.token_bytes(t) for t in ids) == "a€".encode()
    assert SHIPPED.token_bytes(257) == b""  # the end of a reply is no text
