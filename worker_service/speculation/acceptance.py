"""Acceptance of draft tokens by matching: one that the verifier draws as well, with its own random number. No I/O.

The text is the same as without a draft.
"""

from collections.abc import Sequence as Seq


def matching(draft: Seq[int], own: Seq[int]) -> tuple[int, int]:
    """(accepted, next token). `own`: the verifier's tokens at the draft positions and after them, len(draft) + 1."""
    accepted = next((i for i, token in enumerate(draft) if own[i] != token), len(draft))
    return accepted, own[accepted]
