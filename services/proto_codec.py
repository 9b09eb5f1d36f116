"""What services receive as values, and by hand what is sent for every token. Input is not trusted."""

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, Protocol, TypeVar, overload

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from penstock.field_mapping import MappingError
from penstock.mapper import from_message, write
from penstock.proto.common.v1 import common_pb2 as pb
from penstock.services.domain.errors import check, invalid
from penstock.types.problems import FieldProblem
from penstock.types.prompts import MAX_MESSAGES
from penstock.types.replies import EncodedLogprobs, PositionLogprobs, TokenFrame

MAX_PROMPT_CALLS = 4_096  # of all messages of a prompt
MAX_DURATION_S = 315_576_000_000
"""The maximum of google.protobuf.Duration: 10,000 years."""

_T = TypeVar("_T")


@overload
def received(message: Message, kind: type[_T]) -> _T: ...
@overload
def received(message: Message, kind: object) -> Any: ...
def received(message: Message, kind: Any) -> Any:
    """The value of a message, its lists within their limits; ranges are not checked.

    Raises:
        InvalidRequest: A field is missing or too long; the error names it.
    """
    try:
        return from_message(message, kind)
    except MappingError as error:
        raise invalid(error.field, error.problem) from None


class _Checked(Protocol):
    def problems(self) -> Iterator[FieldProblem]: ...


_C = TypeVar("_C", bound=_Checked)


def checked(message: Message, kind: type[_C]) -> _C:
    """The value of a message, all of it checked.

    Raises:
        InvalidRequest: Names every unsound field; of what is too many, the first.
    """
    value = received(message, kind)
    check(value.problems())
    return value


def check_calls(prompt: pb.Prompt, path: str = "prompt") -> None:
    """Check the tool calls of all messages of a prompt together.

    Raises:
        InvalidRequest: There are too many messages or calls.
    """
    messages, path = prompt.chat.messages, f"{path}.chat.messages"
    at_most(messages, MAX_MESSAGES, path, "messages")  # before they are walked: 300,000 empty ones hold the loop up
    if len(messages) > 1 and (calls := sum(len(message.tool_calls) for message in messages)) > MAX_PROMPT_CALLS:
        raise invalid(path, f"at most {MAX_PROMPT_CALLS} tool calls, not {calls}")


def at_most(values: Sized, limit: int, path: str, what: str) -> None:
    """Check the length of a repeated field before it is iterated.

    Raises:
        InvalidRequest: It is too long; the error names `path`.
    """
    if len(values) > limit:
        raise invalid(path, f"at most {limit} {what}, not {len(values)}")


def frame_to_proto(frame: TokenFrame) -> pb.TokenFrame:
    message = pb.TokenFrame(offset=frame.offset, token_ids=frame.token_ids, text=frame.text)
    if isinstance(frame.logprobs, ReceivedLogprobs):
        message.logprobs.extend(frame.logprobs.messages)
    elif frame.logprobs:
        for position in frame.logprobs:
            write(position, message.logprobs.add())
    return message


def frame_from_proto(frame: pb.TokenFrame) -> TokenFrame:
    logprobs = ReceivedLogprobs(frame.logprobs) if frame.logprobs else ()
    return TokenFrame(frame.offset, tuple(frame.token_ids), frame.text, logprobs)


class ReceivedLogprobs(EncodedLogprobs):
    """The logprobs of a frame as they were received. To forward them costs a tenth of decoding and encoding."""

    __slots__ = ("_decoded", "messages")

    def __init__(self, messages: Iterable[pb.PositionLogprobs]) -> None:
        """The messages are copied: a reference would keep the whole message in memory, with the frames of other replies."""
        copy = pb.TokenFrame()
        copy.logprobs.extend(messages)
        self.messages: Sequence[pb.PositionLogprobs] = copy.logprobs
        self._decoded: tuple[PositionLogprobs, ...] | None = None

    def __len__(self) -> int:
        return len(self.messages)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PositionLogprobs, ...]: ...
    def __getitem__(self, index: int | slice) -> PositionLogprobs | tuple[PositionLogprobs, ...]:
        return self._all()[index]

    def __iter__(self) -> Iterator[PositionLogprobs]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (EncodedLogprobs, tuple)) and self._all() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all())

    def joined(self, others: Sequence[Sequence[PositionLogprobs]]) -> Sequence[PositionLogprobs]:
        """These, followed by those of later frames."""
        if not all(isinstance(each, ReceivedLogprobs) for each in others):
            return (*self, *(position for each in others for position in each))
        return ReceivedLogprobs(
            message for each in (self, *others) if isinstance(each, ReceivedLogprobs) for message in each.messages
        )

    def _all(self) -> tuple[PositionLogprobs, ...]:
        if self._decoded is None:
            self._decoded = tuple([from_message(message, PositionLogprobs) for message in self.messages])
        return self._decoded


def seconds(value: Duration, path: str = "duration") -> float:
    """A duration in seconds.

    Raises:
        InvalidRequest: seconds or nanos are out of the range of a Duration.
    """
    if abs(value.seconds) > MAX_DURATION_S or abs(value.nanos) >= 10**9:
        raise invalid(path, f"must be a duration of at most {MAX_DURATION_S} s")
    return value.seconds + value.nanos / 1e9
