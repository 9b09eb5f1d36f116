"""The logits of a step, and the arithmetic on whole rows of them that tokens and logprobs need."""

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
Bits = npt.NDArray[np.int32]


class Ranked(NamedTuple):
    """The most likely tokens of R rows, in descending order, equal ones by their id.

    ids, probabilities (R, top). sure (R): how many of them are sure of their place, as tokens as likely as the last one may
    lie beyond the first `top`; the probabilities of the others are 0. total (R): the sum over the whole vocabulary.
    """

    ids: I64
    probabilities: F32
    sure: I64
    total: F32


class Logits(Protocol):
    """(R, V) logits, wherever they are computed."""

    @property
    def vocabulary(self) -> int:
        """V."""

    def rows(self, chosen: Seq[int]) -> Self:
        """Some rows."""

    def best(self) -> tuple[list[int], list[bool]]:
        """(the first of the most likely tokens, whether there is one) of each row.

        There is none where the row has NaN or +inf, or only -inf.
        """

    def changed(self, rows: I64, tokens: I64, divisors: F32, summands: F32) -> Self:
        """A copy with these logits multiplied by their divisors if they are negative, else divided, plus their summands."""

    def restricted(self, rows: Seq[int], allowed: Bits) -> Self:
        """A copy that is -inf in `rows` where the bits of `allowed` (rows, ceil(V / 32)) are 0."""

    def ranked(self, temperatures: Seq[float], top: int) -> Ranked:
        """The most likely tokens after temperature.

        Valid for every temperature above 0: the maximum of the row is subtracted from the logits before the division, so very
        small temperatures give their limit, the most likely tokens only.
        """

    def logprobs(self, chosen: Seq[int], top: int) -> tuple[list[float], list[list[int]], list[list[float]]]:
        """Natural logarithms of probabilities: (of one token of each row, ids of the `top` most likely ones, theirs)."""


class HostLogits:
    """Logits in memory. values (R, V)."""

    def __init__(self, values: F32) -> None:
        self.values = values

    @property
    def vocabulary(self) -> int:
        return int(self.values.shape[-1])

    def rows(self, chosen: Seq[int]) -> "HostLogits":
        return HostLogits(self.values[list(chosen)])

    def best(self) -> tuple[list[int], list[bool]]:
        tokens = self.values.argmax(-1)  # the first NaN, if there is one
        most = np.take_along_axis(self.values, tokens[:, None], -1)
        return tokens.tolist(), np.isfinite(most[:, 0]).tolist()

    def changed(self, rows: I64, tokens: I64, divisors: F32, summands: F32) -> "HostLogits":
        values, result = self.values[rows, tokens], self.values.copy()
        result[rows, tokens] = np.where(values < 0, values * divisors, values / divisors) + summands
        return HostLogits(result)

    def restricted(self, rows: Seq[int], allowed: Bits) -> "HostLogits":
        result = self.values.copy()
        for row, forbidden in zip(rows, forbidden_by(allowed, self.vocabulary), strict=True):
            result[row, forbidden] = -np.inf
        return HostLogits(result)

    def ranked(self, temperatures: Seq[float], top: int) -> Ranked:
        least = float(np.finfo(np.float32).tiny)  # a lower temperature would be 0 as a float32, and 0 / 0 is NaN
        divisors = np.array([max(each, least) for each in temperatures], np.float32)[:, None]
        with np.errstate(invalid="ignore", over="ignore"):  # rows without a best token have an error instead of a token
            probabilities = np.exp((self.values - self.values.max(-1, keepdims=True)) / divisors)
            total = probabilities.sum(-1)
            probabilities /= total[:, None]
        ids = np.zeros((len(probabilities), top), np.int64)
        ranked, sure = np.zeros((len(probabilities), top), np.float32), np.zeros(len(probabilities), np.int64)
        for row, values in enumerate(probabilities):
            if top >= self.vocabulary:
                likely = np.arange(self.vocabulary)
            else:
                likely = np.flatnonzero(values > np.partition(values, -top)[-top])
            order = likely[np.argsort(-values[likely], kind="stable")]
            sure[row] = len(order)
            ids[row, : len(order)], ranked[row, : len(order)] = order, values[order]
        return Ranked(ids, ranked, sure, probabilities.sum(-1))

    def logprobs(self, chosen: Seq[int], top: int) -> tuple[list[float], list[list[int]], list[list[float]]]:
        most = self.values.max(-1, keepdims=True)
        shares = self.values - most
        sums = most[:, 0] + np.log(np.exp(shares, out=shares).sum(-1))
        top = min(top, self.vocabulary)
        ids = [_most_likely(row, top) for row in self.values] if top else [np.zeros(0, np.int64)] * len(sums)
        own = [float(row[token] - total) for row, token, total in zip(self.values, chosen, sums, strict=True)]
        shown = [(row[each] - total).tolist() for row, each, total in zip(self.values, ids, sums, strict=True)]
        return own, [each.tolist() for each in ids], shown


def _most_likely(row: F32, top: int) -> I64:
    """Of one row, the `top` tokens with the most, in descending order, equal ones by their id."""
    likely = np.flatnonzero(row >= np.partition(row, -top)[-top])
    return likely[np.argsort(-row[likely], kind="stable")][:top]


def forbidden_by(allowed: Bits, vocabulary: int) -> npt.NDArray[np.bool_]:
    """(rows, V) where the bits are 0, or there are none."""
    bits = np.unpackbits(np.ascontiguousarray(allowed).view(np.uint8), axis=1, bitorder="little")[:, :vocabulary]
    return np.pad(bits == 0, ((0, 0), (0, vocabulary - bits.shape[1])), constant_values=True)
