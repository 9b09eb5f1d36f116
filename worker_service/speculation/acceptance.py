"""Acceptance of draft tokens. No I/O.

There are two exact rules. *Matching*: a draft token is accepted if the verifier draws the same token at that position with
its own random number; the text is then the same as without a draft. *Rejection* (Leviathan et al. 2023, and SpecRouter
section 3): a token is accepted with probability min(1, p/q); the first rejected one is replaced by a draw from the normalised
max(0, p - q). The distribution of the text is the verifier's, and drafts from a similar distribution are accepted more often.
"""

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]


def matching(draft: Seq[int], own: Seq[int]) -> tuple[int, int]:
    """(accepted, next token). `own`: the verifier's tokens at the draft positions and behind them, len(draft) + 1."""
    accepted = next((i for i, token in enumerate(draft) if own[i] != token), len(draft))
    return accepted, own[accepted]


def rejection(
    draft: Seq[int], target: Floats, drafted: Seq[tuple[Seq[int], Seq[float]]], chances: Floats, draws: Floats
) -> tuple[int, int]:
    """(accepted, next token).

    target: (len(draft) + 1, V), the verifier's distributions. drafted: per draft token, sparse (ids, probabilities).
    chances, draws: (len(draft) + 1,) uniform numbers, one for the decision and one for the draw at each position.
    """
    for i, token in enumerate(draft):
        ids, probabilities = drafted[i]
        p = float(target[i, token])
        q = sum(prob for t, prob in zip(ids, probabilities, strict=True) if t == token)
        if q > 0 and chances[i] * q < p:
            continue
        residual = target[i].astype(np.float64)
        np.subtract.at(residual, np.asarray(ids, dtype=np.int64), np.asarray(probabilities, dtype=np.float64))
        np.maximum(residual, 0.0, out=residual)
        if residual.sum() <= 0:  # q equals p up to rounding, so any token of p will do
            residual = target[i].astype(np.float64)
        return i, drawn(residual, float(draws[i]))
    return len(draft), drawn(target[-1].astype(np.float64), float(draws[-1]))


def drawn(weights: Floats, chance: float) -> int:
    """The token at the fraction `chance` (0 to 1) of the cumulative weights."""
    total = np.cumsum(weights)
    return int(min(np.searchsorted(total, chance * total[-1], side="right"), np.flatnonzero(weights)[-1]))
