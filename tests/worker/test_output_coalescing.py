"""Frames: the first token at once, later ones together, nothing lost; heartbeats in silence."""

import asyncio
from dataclasses import dataclass, field

from services.domain import TokenFrame
from services.domain.requests import PROGRESS_TOKENS
from worker_service.output_coalescing import (
    MAX_INTERVAL_S,
    CoalescedOutput,
    CoalescingLimits,
    OutputCoalescer,
)

NEVER_S = 3600.0


def token(at: int) -> TokenFrame:
    return TokenFrame(at, (at,), chr(97 + at % 26))


@dataclass
class Sent:
    """What one reply has sent, and when; an error to raise instead."""

    events: list[TokenFrame | None] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    broken: bool = False

    def __call__(self, frame: TokenFrame | None) -> None:
        if self.broken:
            raise LookupError("gone")
        self.events.append(frame)
        self.at_s.append(asyncio.get_running_loop().time())

    @property
    def frames(self) -> list[TokenFrame]:
        return [event for event in self.events if event is not None]

    @property
    def counts(self) -> list[int]:
        return [len(frame.token_ids) for frame in self.frames]

    @property
    def token_ids(self) -> list[int]:
        """Each token once, in order."""
        at = 0
        for frame in self.frames:
            assert frame.offset == at
            at = frame.end
        return [token_id for frame in self.frames for token_id in frame.token_ids]

    def output(self, coalescer: OutputCoalescer, interval_s: float | None = None) -> CoalescedOutput:
        return coalescer.output(self, self.errors.append, interval_s)


async def test_the_first_token_leaves_at_once_and_the_rest_together_at_the_end() -> None:
    sent = Sent()
    with sent.output(OutputCoalescer(CoalescingLimits(NEVER_S, 100, NEVER_S))) as output:
        output.add(token(0))
        assert sent.token_ids == [0]
        for at in range(1, 6):
            output.add(token(at))
        assert sent.token_ids == [0]
    assert sent.counts == [1, 5]
    assert sent.token_ids == list(range(6))
    assert "".join(frame.text for frame in sent.frames) == "abcdef"


async def test_a_frame_holds_no_more_than_its_limit() -> None:
    sent = Sent()
    with sent.output(OutputCoalescer(CoalescingLimits(NEVER_S, 3, NEVER_S))) as output:
        for at in range(10):
            output.add(token(at))
    assert sent.counts == [1, 3, 3, 3]
    assert sent.token_ids == list(range(10))


async def test_tokens_wait_no_longer_than_the_interval_those_of_all_replies_together() -> None:
    """One timer for all; a reply whose tokens came later leaves with the others, early rather than late."""
    coalescer = OutputCoalescer(CoalescingLimits(0.5, 100, NEVER_S))
    replies = [Sent() for _ in range(5)]
    outputs = [sent.output(coalescer) for sent in replies]
    for output in outputs:
        output.__enter__()
        output.add(token(0))
        output.add(token(1))
    async with asyncio.timeout(60):
        while not any(len(sent.frames) == 2 for sent in replies):
            await asyncio.sleep(0.001)
    assert all(len(sent.frames) == 2 for sent in replies), "they leave together"
    assert replies[0].at_s[1] - replies[0].at_s[0] >= 0.3
    for output in outputs:
        output.__exit__(None, None, None)


async def test_a_reply_that_nobody_streams_waits_longer_but_shows_its_progress() -> None:
    """Its first token leaves at once, the next frame as soon as the router can see that the request runs well."""
    sent = Sent()
    with sent.output(OutputCoalescer(CoalescingLimits(0.0, 4, NEVER_S)), MAX_INTERVAL_S) as output:
        for at in range(200):
            output.add(token(at))
    assert sent.counts == [1, PROGRESS_TOKENS, 199 - PROGRESS_TOKENS]
    assert sent.token_ids == list(range(200))


async def test_the_longest_wait_is_bounded_whatever_is_asked_for() -> None:
    coalescer = OutputCoalescer(CoalescingLimits(0.02, 4, NEVER_S))
    loop, sent = asyncio.get_running_loop(), Sent()
    with sent.output(coalescer, 1e9) as output:
        output.add(token(0))
        assert output.due_s <= loop.time() + MAX_INTERVAL_S


async def test_silence_is_filled_with_heartbeats_until_the_output_is_closed() -> None:
    coalescer, sent, other = OutputCoalescer(CoalescingLimits(0.0, 3, 0.01)), Sent(), Sent()
    with sent.output(coalescer), other.output(coalescer):
        async with asyncio.timeout(60):
            while sent.events.count(None) < 3 or other.events.count(None) < 3:
                await asyncio.sleep(0.001)
    assert all(later - earlier >= 0.01 for earlier, later in zip(sent.at_s, sent.at_s[1:], strict=False))
    assert coalescer._sweep is None, "nothing looks at outputs that are closed"


async def test_tokens_before_an_error_leave_and_those_of_a_cancelled_reply_do_not() -> None:
    coalescer = OutputCoalescer(CoalescingLimits(NEVER_S, 100, NEVER_S))
    for error, count in ((LookupError("gone"), 2), (asyncio.CancelledError(), 1)):
        sent = Sent()
        output = sent.output(coalescer).__enter__()
        output.add(token(0))
        output.add(token(1))
        output.__exit__(type(error), error, None)
        assert len(sent.token_ids) == count


async def test_what_fails_to_leave_fails_its_own_reply_once() -> None:
    """Also where it leaves by the timer, with others."""
    coalescer, broken, fine = OutputCoalescer(CoalescingLimits(0.01, 100, NEVER_S)), Sent(), Sent()
    with broken.output(coalescer) as one, fine.output(coalescer) as other:
        for at in range(2):
            one.add(token(at))
            other.add(token(at))
        broken.broken = True
        async with asyncio.timeout(60):
            while len(fine.frames) < 2:
                await asyncio.sleep(0.001)
        one.add(token(2))
        one.flush()
    assert [str(error) for error in broken.errors] == ["gone"]
    assert broken.token_ids == [0]
    assert fine.token_ids == [0, 1]
