"""Tokens: the first at once, later ones together, nothing lost; heartbeats in silence."""

import asyncio
import time

from penstock.types.replies import TokenFrame
from penstock.types.requests import PROGRESS_TOKENS
from penstock.worker_service.engine.held_tokens import MAX_FRAME_TOKENS, MAX_INTERVAL_S, HeldTokens, OutputCoalescing
from penstock.worker_service.replies.heartbeats import Heartbeats


def frames(held: HeldTokens, tokens: int, now_s: float = 0.0) -> list[TokenFrame]:
    """What is handed out while so many tokens come at once, and at the end."""
    out = list[TokenFrame | None]()
    for at in range(tokens):
        held.add(TokenFrame(at, (at,), chr(97 + at % 26)))
        if held.due(now_s):
            out.append(held.take(now_s))
    return [frame for frame in (*out, held.take(now_s)) if frame is not None]


def counts(handed_out: list[TokenFrame]) -> list[int]:
    """How many tokens each frame has: each token once, in order."""
    assert [token for frame in handed_out for token in frame.token_ids] == list(range(handed_out[-1].end))
    return [len(frame.token_ids) for frame in handed_out]


def test_the_first_token_does_not_wait_and_a_frame_has_no_more_than_its_limit() -> None:
    out = frames(HeldTokens(OutputCoalescing(3600.0, 3)), 10)
    assert counts(out) == [1, 3, 3, 3]
    assert "".join(frame.text for frame in out) == "abcdefghij"


def test_tokens_wait_for_the_interval_and_no_longer() -> None:
    held = HeldTokens(OutputCoalescing(0.5, 100))
    assert counts(frames(held, 1)) == [1]
    held.add(TokenFrame(1, (1,), "b"))
    assert not held.due(0.49)
    assert held.due(0.5)


def test_a_reply_that_nobody_streams_waits_longer_but_shows_its_progress() -> None:
    """Its first token leaves at once, the next frame as soon as the router can see that the request runs well."""
    held = HeldTokens(OutputCoalescing(0.02, 4), 1e9)
    assert counts(frames(held, 700)) == [
        1,
        PROGRESS_TOKENS,
        MAX_FRAME_TOKENS,
        700 - 1 - PROGRESS_TOKENS - MAX_FRAME_TOKENS,
    ]
    held.add(TokenFrame(700, (0,), ""))
    assert held.due(MAX_INTERVAL_S), "the longest wait is bounded whatever is asked for"


class Reply:
    def __init__(self) -> None:
        self.sent_s = time.monotonic()
        self.gaps_s = list[float]()

    def heartbeat(self) -> None:
        now_s = time.monotonic()
        self.gaps_s.append(now_s - self.sent_s)
        self.sent_s = now_s


async def test_silence_is_filled_with_heartbeats_until_the_reply_ends() -> None:
    heartbeats, one, other = Heartbeats(0.01), Reply(), Reply()
    with heartbeats.of(one), heartbeats.of(other):
        async with asyncio.timeout(60):
            while len(one.gaps_s) < 3 or len(other.gaps_s) < 3:
                await asyncio.sleep(0.001)
    assert all(gap_s >= 0.01 for gap_s in (*one.gaps_s, *other.gaps_s))
    assert heartbeats._timer is None, "nothing looks at replies that have ended"
