"""Samples tokens from the logits of all rows at once. Random numbers depend on the seed and position of each row."""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from penstock.services.domain.randomness import uniform
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.penalties import LogitChanges, logit_changes
from penstock.worker_service.engine.runner import RawLogprobs

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


def best(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """(the first of the most likely tokens, whether there is one) of each row of (R, V) logits.

    There is none where the row has NaN or +inf, or only -inf.
    """
    most, tokens = logits.max(-1)
    return tokens.tolist(), [math.isfinite(value) for value in most.tolist()]


def adjusted(logits: torch.Tensor, positions: Seq[Position]) -> torch.Tensor:
    """(R, V) logits with the penalties and biases of their positions; the logits themselves if there are none."""
    rows: list[npt.NDArray[np.int64]] = []
    changes: list[LogitChanges] = []
    for row, position in enumerate(positions):
        sampling = position.sampling
        if not (sampling.logit_bias or position.output):
            continue
        if (change := logit_changes(sampling, position.output, logits.shape[-1])) is not None:
            rows.append(np.full(len(change.token_ids), row))
            changes.append(change)
    if not changes:
        return logits
    row_ids, token_ids, divisors, summands = (
        torch.from_numpy(np.concatenate(parts)).to(logits.device) for parts in (rows, *zip(*changes, strict=True))
    )
    values = logits[row_ids, token_ids]
    values = torch.where(values < 0, values * divisors, values / divisors) + summands
    result = logits.clone()
    result[row_ids, token_ids] = values.to(logits.dtype)
    return result


def restricted(logits: torch.Tensor, rows: Seq[int], allowed: npt.NDArray[np.int32]) -> torch.Tensor:
    """A copy of (R, V) logits that is -inf in `rows` where the bits of `allowed` (rows, ceil(V / 32)) are 0."""
    bits = np.unpackbits(np.ascontiguousarray(allowed).view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[-1]]
    forbidden = torch.ones((len(rows), logits.shape[-1]), dtype=torch.bool)
    forbidden[:, : bits.shape[1]] = torch.from_numpy(bits == 0)
    masked = logits.clone()
    masked[list(rows)] = masked[list(rows)].masked_fill(forbidden.to(logits.device), -torch.inf)
    return masked


def choose(logits: torch.Tensor, positions: Seq[Position], most_likely: Seq[int] | None = None) -> list[int]:
    """The next token of every row of (R, V) logits; any token for a row that has no best one.

    most_likely: the `best` tokens where they are known.
    """
    tokens = list(best(logits)[0] if most_likely is None else most_likely)
    drawn = [i for i, p in enumerate(positions) if not p.sampling.greedy]
    if drawn:
        probabilities = _probabilities(logits[drawn], [positions[i] for i in drawn])
        vocabulary = logits.shape[-1]
        for top in (*(count for count in RANKED_FIRST if count < vocabulary), vocabulary):
            chosen, decided = _draw(probabilities, [positions[i] for i in drawn], top)
            for row, token in zip(drawn, chosen, strict=True):
                tokens[row] = token
            undecided = [i for i, is_decided in enumerate(decided) if not is_decided]
            if not undecided:
                break
            drawn, probabilities = [drawn[i] for i in undecided], probabilities[undecided]
    return tokens


def _probabilities(logits: torch.Tensor, positions: Seq[Position]) -> torch.Tensor:
    """(R, V) probabilities after temperature.

    Valid for every temperature above 0: the maximum of the row is subtracted from the logits before the division, so very
    small temperatures give their limit, the most likely tokens only.
    """
    least = torch.finfo(logits.dtype).tiny  # a lower temperature would be 0 in this dtype, and 0 / 0 is NaN
    temperatures = [max(p.sampling.temperature or 1.0, least) for p in positions]
    temperature = torch.tensor(temperatures, dtype=logits.dtype, device=logits.device)
    return torch.softmax((logits - logits.amax(-1, keepdim=True)).div_(temperature[:, None]), -1)


def _ranked(probabilities: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The most likely tokens of (R, V) probabilities, in descending order, equal ones by their id.

    Returns ids and probabilities (R, top), and how many of them are sure of their place (R,): tokens as likely as the last
    one may lie beyond the first `top`. The probabilities of the others are 0.
    """
    if top >= probabilities.shape[-1]:
        ranked, ids = probabilities.sort(stable=True, dim=-1, descending=True)
        return ids, ranked, torch.full_like(ids[:, 0], ids.shape[-1])
    best = probabilities.topk(top, -1, sorted=False)
    ids = best.indices.sort(-1).values
    values = probabilities.gather(1, ids)
    sure = values > best.values.amin(-1, keepdim=True)
    ranked, order = torch.where(sure, values, 0.0).sort(stable=True, dim=-1, descending=True)
    return ids.gather(1, order), ranked, sure.sum(-1)


def _kept(ranked: torch.Tensor, positions: Seq[Position]) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the ranked tokens may be drawn, and the sums of their probabilities so far, both (R, top).

    Top-k goes first; top-p is a share of what it leaves; min-p cuts off the rest, as in transformers and SGLang.
    """
    device = ranked.device
    precise = ranked.double()
    sums = precise.cumsum(-1)
    top_p = torch.tensor([p.sampling.top_p or 1.0 for p in positions], dtype=torch.float64, device=device)
    top_k = torch.tensor([p.sampling.top_k or ranked.shape[-1] for p in positions], device=device)
    top_k = top_k.clamp(max=ranked.shape[-1])
    within = torch.arange(ranked.shape[-1], device=device) < top_k[:, None]
    limited = torch.tensor([bool(p.sampling.top_k) for p in positions], device=device)
    mass = torch.where(limited, sums.gather(1, top_k[:, None] - 1).squeeze(1), 1.0)
    keep = within & ((sums - precise < (top_p * mass)[:, None]) | (top_p >= 1)[:, None])
    if any(p.sampling.min_p for p in positions):
        min_p = torch.tensor([p.sampling.min_p for p in positions], dtype=torch.float64, device=device)
        keep &= precise >= min_p[:, None] * precise[:, :1]
    keep[:, 0] = True
    return keep, sums


def _draw(probabilities: torch.Tensor, positions: Seq[Position], top: int) -> tuple[list[int], list[bool]]:
    """A token for each row of (R, V) probabilities, and whether the `top` most likely tokens suffice to know it."""
    vocabulary = probabilities.shape[-1]
    ids, ranked, sure = _ranked(probabilities, top)
    keep, sums = _kept(ranked, positions)
    count = keep.sum(-1)
    top_k = torch.tensor([p.sampling.top_k or 0 for p in positions], device=ids.device)
    complete = (sure == vocabulary) | ((count < sure) & (top_k <= sure))  # the set ends within the ranked tokens
    uncut = [(p.sampling.top_p or 1.0) >= 1 and not p.sampling.min_p for p in positions]
    everything = (top_k == 0) & torch.tensor(uncut, device=ids.device)
    limited = sums.gather(1, count[:, None] - 1).squeeze(1)
    total = torch.where(everything, probabilities.sum(-1).double(), limited)
    chances = [uniform(p.sampling.seed or 0, p.offset) for p in positions]
    goal = torch.tensor(chances, dtype=torch.float64, device=ids.device) * total
    place = torch.searchsorted(sums, goal[:, None], right=True)
    last = ((keep & (ranked > 0)).sum(-1, keepdim=True) - 1).clamp(min=0)
    decided = complete | (everything & (place.squeeze(1) < sure))
    return ids.gather(1, torch.minimum(place, last)).squeeze(1).tolist(), decided.tolist()


def logprobs(logits: torch.Tensor, chosen: Seq[int], counts: Seq[int]) -> list[RawLogprobs]:
    """Logprobs of (R, V) logits before temperature and top-p: the chosen tokens and the `counts[r]` most likely ones."""
    values = torch.log_softmax(logits.float(), -1)
    most = max(counts)
    own = values.gather(1, torch.tensor(chosen, device=logits.device)[:, None]).squeeze(1).tolist()
    if most == 0:
        return [RawLogprobs(value) for value in own]
    top, ids = values.topk(min(most, values.shape[-1]), -1)
    return [
        RawLogprobs(value, i[:count], t[:count])
        for value, i, t, count in zip(own, ids.tolist(), top.tolist(), counts, strict=True)
    ]
