"""Replies: their tokens, logprobs, usage and end."""

import enum
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.types.values import value_type


class FinishReason(enum.StrEnum):
    """Why a reply ended. MIGRATED: it continues on another worker."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    DECLINED = "declined"
    MIGRATED = "migrated"
    UNKNOWN = "aborted"  # a reason of a later version: an alias


@value_type(frozen=True, slots=True)
class Usage:
    """Tokens of a reply.

    accepted_draft_tokens: of the output tokens, those that a draft proposed. rejected_draft_tokens: verified in vain.
    compute_s: the reply's share of the GPUs' time (on a CPU: the engine's) on the instance that ended it; 0 if unknown.
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    token_bytes: bytes


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The logprobs at one output position. top: the most likely tokens first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@value_type(frozen=True, slots=True)
class TokenFrame:
    """Consecutive output tokens of one reply; `offset` is the output position of the first."""

    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: Sequence[PositionLogprobs] = ()

    @property
    def end(self) -> int:
        return self.offset + len(self.token_ids)

    @classmethod
    def joined(cls, frames: "Sequence[TokenFrame]") -> "TokenFrame":
        """Join consecutive frames, at least one."""
        if len(frames) == 1:
            return frames[0]
        return cls(
            frames[0].offset,
            tuple(token for frame in frames for token in frame.token_ids),
            "".join(frame.text for frame in frames),
            _joined_logprobs([frame.logprobs for frame in frames if frame.logprobs]),
        )


class EncodedLogprobs(Sequence[PositionLogprobs]):
    """Logprobs in another form, such as that of a message, that are decoded when they are read."""

    @abstractmethod
    def joined(self, others: Sequence[Sequence[PositionLogprobs]]) -> Sequence[PositionLogprobs]:
        """These, followed by those of later frames."""


def _joined_logprobs(parts: Sequence[Sequence[PositionLogprobs]]) -> Sequence[PositionLogprobs]:
    """The logprobs of consecutive frames."""
    if parts and isinstance(parts[0], EncodedLogprobs):
        return parts[0].joined(parts[1:])
    return tuple(position for part in parts for position in part)
