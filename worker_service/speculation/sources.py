"""Where the drafts of a running reply come from. No I/O.

The verifier computes the last token of a reply and the proposed tokens in one pass, and draws its own token at each of these
positions. Proposed tokens stand as far as they equal its tokens (`acceptance.matching`), so a source never changes a reply:
it only decides how many of its tokens one pass yields.
"""

from collections.abc import Sequence as Seq
from typing import Protocol


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

        accepted: how many tokens of the proposal stand, 0 if none were verified. token: the verifier's token behind them.
        Together, these are the new tokens of the reply. It is not called after the step that ends the reply.
        """
        ...
