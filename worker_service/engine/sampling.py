"""Samples tokens from the logits of all rows at once. Random numbers depend on the seed and position of each row."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from penstock.services.domain.randomness import uniform
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.logits import I64, Logits, Ranked
from penstock.worker_service.engine.penalties import LogitChanges, logit_changes
from penstock.worker_service.engine.runner import RawLogprobs

L = TypeVar("L", bound=Logits)
RANKED_FIRST = (256, 8192)
"""Numbers of most likely tokens that are sorted before the whole vocabulary is: nearly every draw is among the first."""


@dataclass(frozen=True, slots=True)
class Position:
    """A position that needs a token: its sampling parameters and its output position.

    output: the reply's tokens before it, if its sampling parameters penalize them.
    """

    sampling: SamplingParams
    offset: int
    output: Seq[int] = ()


def adjusted(logits: L, positions: Seq[Position]) -> L:
    """(R, V) logits with the penalties and biases of their positions; the logits themselves if there are none."""
    rows: list[I64] = []
    changes: list[LogitChanges] = []
    for row, position in enumerate(positions):
        sampling = position.sampling
        if not (sampling.logit_bias or position.output):
            continue
        if (change := logit_changes(sampling, position.output, logits.vocabulary)) is not None:
            rows.append(np.full(len(change.token_ids), row))
            changes.append(change)
    if not changes:
        return logits
    tokens, divisors, summands = (np.concatenate(parts) for parts in zip(*changes, strict=True))
    return logits.changed(np.concatenate(rows), tokens, divisors, summands)


def choose(logits: Logits, positions: Seq[Position], most_likely: Seq[int] | None = None) -> list[int]:
    """The next token of every row of (R, V) logits; any token for a row that has no best one.

    most_likely: the `best` tokens where they are known.
    """
    tokens = list(logits.best()[0] if most_likely is None else most_likely)
    drawn = [i for i, p in enumerate(positions) if not p.sampling.greedy]
    for top in (*(count for count in RANKED_FIRST if count < logits.vocabulary), logits.vocabulary):
        if not drawn:
            break
        chosen, decided = _draw(logits.rows(drawn), [positions[i] for i in drawn], top)
        for row, token in zip(drawn, chosen, strict=True):
            tokens[row] = token
        drawn = [row for row, is_decided in zip(drawn, decided, strict=True) if not is_decided]
    return tokens


def _kept(ranked: Ranked, positions: Seq[Position]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Which of the ranked tokens may be drawn, and the sums of their probabilities so far, both (R, top).

    Top-k goes first; top-p is a share of what it leaves; min-p cuts off the rest, as in transformers and SGLang.
    """
    precise = ranked.probabilities.astype(np.float64)
    sums, top = precise.cumsum(-1), precise.shape[-1]
    top_p = np.array([p.sampling.top_p or 1.0 for p in positions])[:, None]
    top_k = np.array([min(p.sampling.top_k or top, top) for p in positions])[:, None]
    limited = np.array([bool(p.sampling.top_k) for p in positions])[:, None]
    mass = np.where(limited, np.take_along_axis(sums, top_k - 1, -1), 1.0)
    keep = (np.arange(top) < top_k) & ((sums - precise < top_p * mass) | (top_p >= 1))
    keep &= precise >= np.array([p.sampling.min_p for p in positions])[:, None] * precise[:, :1]
    keep[:, 0] = True
    return keep, sums


def _draw(logits: Logits, positions: Seq[Position], top: int) -> tuple[list[int], list[bool]]:
    """A token for each row of (R, V) logits, and whether the `top` most likely tokens suffice to know it."""
    ranked = logits.ranked([p.sampling.temperature or 1.0 for p in positions], top)
    keep, sums = _kept(ranked, positions)
    count, sure = keep.sum(-1), ranked.sure
    top_k = np.array([p.sampling.top_k or 0 for p in positions])
    complete = (sure == logits.vocabulary) | ((count < sure) & (top_k <= sure))  # the set ends within the ranked tokens
    everything = np.array(
        [(p.sampling.top_p or 1.0) >= 1 and not (p.sampling.min_p or p.sampling.top_k) for p in positions]
    )
    limited = np.take_along_axis(sums, count[:, None] - 1, -1)[:, 0]
    chances = np.array([uniform(p.sampling.seed or 0, p.offset) for p in positions])
    goal = chances * np.where(everything, ranked.total.astype(np.float64), limited)
    place = (sums <= goal[:, None]).sum(-1)  # the first of which the sum is over the goal
    last = np.maximum((keep & (ranked.probabilities > 0)).sum(-1) - 1, 0)
    decided = complete | (everything & (place < sure))
    return np.take_along_axis(ranked.ids, np.minimum(place, last)[:, None], -1)[:, 0].tolist(), decided.tolist()


def logprobs(logits: Logits, chosen: Seq[int], counts: Seq[int]) -> list[RawLogprobs]:
    """Logprobs of (R, V) logits before temperature and top-p: the chosen tokens and the `counts[r]` most likely ones."""
    rows = zip(*logits.logprobs(chosen, max(counts)), counts, strict=True)
    return [RawLogprobs(value, ids[:count], top[:count]) for value, ids, top, count in rows]
