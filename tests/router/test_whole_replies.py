"""Replies that are not streamed: the same JSON however it is put together, and nobody waits for it long."""

import json

import pytest

from router_service.domain.events import Finished
from router_service.openai_gateway import replies, whole_replies
from router_service.openai_gateway.json_values import json_bytes
from router_service.openai_gateway.replies import ChatFormat, Choice, CompletionFormat, Format
from services.domain.requests import FinishReason, PositionLogprobs, TokenFrame, TokenLogprob, TokenUsage


def choice(index: int, positions: int, top: int) -> Choice:
    """A finished choice with logprobs; its text has what JSON escapes."""
    likelier = tuple(TokenLogprob(i, -1.5 - i, f't{i}"'.encode()) for i in range(top))
    logprobs = tuple(
        PositionLogprobs(TokenLogprob(9, -0.25, 'é"\\'.encode()[: 1 + at % 4]), likelier) for at in range(positions)
    )
    made = Choice(index)
    made.answer("small", TokenFrame(0, (9,) * positions, 'a "b"\n\\ é', logprobs))
    made.event(Finished(FinishReason.STOP, "small", TokenUsage(1, 0, positions), (), 0.1, 0.2, "t"))
    return made


@pytest.mark.parametrize("shape", [ChatFormat(), CompletionFormat()])
@pytest.mark.parametrize("logprobs", [True, False])
async def test_a_reply_put_together_in_slices_is_the_reply(shape: Format, logprobs: bool) -> None:
    """Also where the last slice is not full, where there is one position, and where there is none."""
    choices = [choice(i, count, 20) for i, count in enumerate((0, 1, 47, 48, 500))]
    head = replies.envelope(shape, "r", "small", chunk=False) | {"usage": {}}
    body = json.loads(await whole_replies.encoded(shape, head, choices, logprobs=logprobs))
    assert body == head | {"choices": [shape.choice(c, logprobs=logprobs) for c in choices]}


@pytest.mark.parametrize("shape", [ChatFormat(), CompletionFormat()])
async def test_others_have_their_turn_between_slices(shape: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than `SLICE_VALUES` logprobs are encoded without a pause."""
    largest, turns = 0, 0
    dumps = whole_replies._dumps

    def counted(value: object) -> str:
        nonlocal largest
        if isinstance(value, list):
            largest = max(largest, sum(1 + len(v.get("top_logprobs", ())) for v in value if isinstance(v, dict)))
        return dumps(value)

    async def pause(_: float) -> None:
        nonlocal turns
        turns += 1

    monkeypatch.setattr(whole_replies, "_dumps", counted)
    monkeypatch.setattr("asyncio.sleep", pause)
    await whole_replies.encoded(shape, {"id": "r"}, [choice(0, 1000, 20)], logprobs=True)
    assert largest <= whole_replies.SLICE_VALUES
    assert turns >= 21_000 / whole_replies.SLICE_VALUES


def test_half_a_surrogate_pair_is_written_as_an_escape() -> None:
    """The compiled encoder refuses it; no reply fails for it."""
    assert json.loads(json_bytes({"text": "a\ud83d", "score": 0.5})) == {"text": "a\ud83d", "score": 0.5}
    assert json_bytes({"text": "é"}) == '{"text":"é"}'.encode()
