"""Samples tokens from the logits of all rows at once. Random numbers depend on the seed and position of each row."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.domain.requests import SamplingParams
from worker_service.engine.randomness import uniform
from worker_service.engine.runner import RawLogprobs


@dataclass(frozen=True, slots=True)
class Position:
    """A position that needs a token: its sampling parameters and its output position."""

    sampling: SamplingParams
    offset: int


def finite(logits: torch.Tensor) -> list[bool]:
    """Whether each row of (R, V) logits has a maximum: no NaN, no +inf, and not only -inf."""
    result: list[bool] = torch.isfinite(logits.amax(-1)).tolist()
    return result


def restricted(logits: torch.Tensor, rows: Seq[int], allowed: npt.NDArray[np.int32]) -> torch.Tensor:
    """A copy of (R, V) logits that is -inf in `rows` where the bits of `allowed` (rows, ceil(V / 32)) are 0."""
    bits = np.unpackbits(np.ascontiguousarray(allowed).view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[-1]]
    forbidden = torch.ones((len(rows), logits.shape[-1]), dtype=torch.bool)
    forbidden[:, : bits.shape[1]] = torch.from_numpy(bits == 0)
    masked = logits.clone()
    masked[list(rows)] = masked[list(rows)].masked_fill(forbidden.to(logits.device), -torch.inf)
    return masked


def distributions(logits: torch.Tensor, positions: Seq[Position]) -> torch.Tensor:
    """(R, V) probabilities after temperature and top-p; a greedy row has one token."""
    rows = torch.zeros_like(logits)
    drawn = [i for i, p in enumerate(positions) if not p.sampling.greedy]
    greedy = [i for i, p in enumerate(positions) if p.sampling.greedy]
    if greedy:
        rows[greedy, logits[greedy].argmax(-1)] = 1.0
    if drawn:
        ids, top_p = _top_p(logits[drawn], [positions[i] for i in drawn])
        rows[drawn] = torch.zeros_like(top_p).scatter(1, ids, top_p / top_p.sum(-1, keepdim=True))
    return rows


def choose(logits: torch.Tensor, positions: Seq[Position]) -> list[int]:
    """The next token of every row of (R, V) logits; any token for a row that is not `finite`."""
    chosen = logits.argmax(-1)
    drawn = [i for i, p in enumerate(positions) if not p.sampling.greedy]
    if drawn:
        ids, top_p = _top_p(logits[drawn], [positions[i] for i in drawn])
        chances = torch.tensor(
            [uniform(positions[i].sampling.seed or 0, positions[i].offset) for i in drawn],
            dtype=torch.float64,
            device=logits.device,
        )
        total = top_p.double().cumsum(-1)
        at = torch.searchsorted(total, (chances * total[:, -1])[:, None], right=True)
        last = ((top_p > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
        chosen[drawn] = ids.gather(1, torch.minimum(at, last)).squeeze(1)
    tokens: list[int] = chosen.tolist()
    return tokens


def _top_p(logits: torch.Tensor, positions: Seq[Position]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and probabilities (R, V) in descending order; 0 outside the top-p set, not renormalised.

    Valid for every temperature above 0 and every top-p: the maximum of the row is subtracted from the logits before the
    division, so very small temperatures give their limit, the most likely tokens only.
    """
    dtype, device = logits.dtype, logits.device
    least = torch.finfo(dtype).tiny  # a lower temperature would be 0 in this dtype, and 0 / 0 is NaN
    temperature = torch.tensor([max(p.sampling.temperature, least) for p in positions], dtype=dtype, device=device)
    top_p = torch.tensor([p.sampling.top_p for p in positions], dtype=torch.float64, device=device)
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    probabilities, ids = torch.softmax(scaled, -1).sort(stable=True, dim=-1, descending=True)
    precise = probabilities.double()
    before = precise.cumsum(-1) - precise
    keep = before < top_p[:, None]
    keep[:, 0] = True
    return ids, torch.where(keep, probabilities, 0.0)


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
