"""One reply from the parts of several instances: pure."""

import pytest

from penstock.router_service.domain.failures import Failure, InstanceFailed
from penstock.router_service.generation.reply_assembler import ReplyAssembler, TierEvent
from penstock.types.events import InstanceChanged, TierAdmitted, TierStarted
from penstock.types.replies import TokenFrame

RESUMED = (7, 8)


class Reply:
    """An assembler of a reply that resumes after two tokens, and what it has passed on."""

    def __init__(self) -> None:
        self.events: list[TierEvent] = []
        self.frames: list[TokenFrame] = []
        self.assembler = ReplyAssembler("small", RESUMED, 3, self.events.append, self.frames.append)


def frame(offset: int, *token_ids: int) -> TokenFrame:
    return TokenFrame(offset, token_ids, "text")


def test_an_instance_is_reported_once_when_it_first_sends_something() -> None:
    """One that sends nothing is not reported, and the next one names the last that was."""
    reply = Reply()
    reply.assembler.try_instance("a", "")
    assert (reply.events, reply.assembler.reported) == ([], False)
    reply.assembler.begin()
    reply.assembler.begin()
    assert (reply.events, reply.assembler.reported) == ([TierStarted("small", "a")], True)
    reply.assembler.take(frame(2, 10, 11))
    reply.assembler.try_instance("b", "it died")
    reply.assembler.try_instance("c", "it was full")
    assert len(reply.events) == 1
    reply.assembler.begin()
    assert reply.events[1:] == [InstanceChanged("small", "a", "c", 4, "it was full")]


def test_a_move_reports_the_source_first_and_the_target_once() -> None:
    reply = Reply()
    reply.assembler.try_instance("a", "")
    reply.assembler.moved("b", "length")
    reply.assembler.begin()
    assert reply.events == [TierStarted("small", "a"), InstanceChanged("small", "a", "b", 2, "length", moved=True)]
    reply.assembler.try_instance("c", "it died")
    reply.assembler.begin()
    assert reply.events[2:] == [InstanceChanged("small", "b", "c", 2, "it died")]


def test_an_admission_reports_the_instance_and_sets_the_length() -> None:
    reply = Reply()
    reply.assembler.try_instance("a", "")
    admitted = TierAdmitted("small", "a", slo_kept=True, prompt_tokens=5, max_output_tokens=4)
    reply.assembler.admitted(admitted)
    assert reply.events == [TierStarted("small", "a"), admitted]
    assert (reply.assembler.prompt_tokens, reply.assembler.is_full_length) == (5, False)
    reply.assembler.take(frame(2, 10, 11))
    assert reply.assembler.is_full_length


@pytest.mark.parametrize("offset", [1, 3])
def test_tokens_that_are_missing_or_come_twice_are_a_failure_and_not_passed_on(offset: int) -> None:
    reply = Reply()
    reply.assembler.try_instance("a", "")
    reply.assembler.begin()
    with pytest.raises(InstanceFailed, match=f"offset {offset} instead of 2") as caught:
        reply.assembler.take(frame(offset, 10))
    assert caught.value.failure is Failure.PROTOCOL_ERROR
    assert (reply.frames, reply.assembler.token_ids) == ([], [*RESUMED])
    reply.assembler.take(frame(2, 10))
    assert (reply.frames, reply.assembler.token_ids) == ([frame(2, 10)], [*RESUMED, 10])


def test_tokens_before_the_admission_are_a_failure_at_every_instance() -> None:
    reply = Reply()
    for name in ("a", "b"):
        reply.assembler.try_instance(name, "")
        with pytest.raises(InstanceFailed, match="before the request was admitted"):
            reply.assembler.take(frame(2, 10))
        reply.assembler.begin()
    assert reply.frames == []


def test_new_tokens_are_those_of_the_instance_that_is_tried_now() -> None:
    reply = Reply()
    assert reply.assembler.new_tokens("a") == 0, "none is tried yet"
    reply.assembler.try_instance("a", "")
    reply.assembler.begin()
    reply.assembler.take(frame(2, 10, 11))
    assert (reply.assembler.new_tokens("a"), reply.assembler.new_tokens("b")) == (2, 0)
    reply.assembler.moved("b", "length")
    reply.assembler.take(frame(4, 12))
    assert (reply.assembler.new_tokens("a"), reply.assembler.new_tokens("b")) == (0, 1)
    reply.assembler.try_instance("c", "it died")
    assert reply.assembler.new_tokens("c") == 0
