"""Where the drafts of a running reply come from. No I/O.

The verifier computes the last token of a reply and the proposed tokens in one pass, and draws its own token at each of these
positions. Proposed tokens are accepted as far as they equal its tokens (`acceptance.matching`), so a source never
changes a reply: it only decides how many of its tokens one pass yields.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from penstock.services.domain.slo.draft_windows import DraftPace
from penstock.types.sampling import SamplingParams


class DraftSource(Protocol):
    """Proposes the next tokens of one reply: a given answer, or a smaller model.

    A source belongs to one request and one engine. It is called on the engine's thread between two steps, so it must be fast.
    If it raises, it is dropped and counted, and the reply continues without it.
    """

    def propose(self, tokens: Seq[int], limit: int) -> Seq[int]:
        """The tokens that probably follow; none if there is nothing worth verifying.

        tokens: prompt and reply so far; not to be kept or changed. limit: at most so many are verified, at least 1.

        Not every proposed token is verified: the engine leaves out an end token, a token that the model does not have, and
        what there is no room for in the step, each with all that follows.
        """
        ...

    def observe(self, accepted: int, token: int) -> None:
        """Called after every step that continued the reply, also if `propose` was not called before it.

        accepted: how many tokens of the proposal are accepted, 0 if none were verified. token: the verifier's token
        after them. Together, these are the new tokens of the reply. It is not called after the step that ends the reply.
        """
        ...


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A running reply whose next tokens may be drafted. The fields of a proposal are as in `DraftSource.propose`.

    offset: output position of the next token, which decides its random number.
    """

    request_id: str
    tokens: Seq[int]
    limit: int
    sampling: SamplingParams
    offset: int


@dataclass(frozen=True, slots=True)
class VerifiedStep:
    """A step after its proposals were verified.

    replies: how many replies it continued. rows: tokens that it computed. decodes_only: whether it computed nothing else
    than one token and the proposed ones for each reply. seconds: its duration, drafting not included.
    accepted: by request, (tokens verified, tokens that are accepted) of what the drafter proposed.
    """

    replies: int
    rows: int
    decodes_only: bool
    seconds: float
    accepted: dict[str, tuple[int, int]]


class Drafter(Protocol):
    """Proposes the next tokens of all running replies of an engine, by smaller models. Called between two steps.

    failures: models that failed and are not used any more. current: the chain that drafts, small to large, and how many
    tokens its first model drafts; ((), 0) while none does. Both may be read by any thread.
    """

    failures: int
    current: tuple[tuple[str, ...], int]

    def pace(self, replies: int) -> DraftPace:
        """What drafts of so many replies are worth now."""
        ...

    def propose(self, requests: Seq[DraftRequest]) -> Seq[Seq[int]]:
        """Tokens for each request; none where nothing is worth verifying."""
        ...

    def observe(self, step: VerifiedStep) -> None:
        """Called after every step that continued a reply."""
        ...

    def forget(self, request_id: str) -> None:
        """Called when a request has ended or moved away; no error if it was never drafted."""
        ...
