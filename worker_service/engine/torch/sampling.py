"""From logits to tokens, for all rows at once; every random number comes from its row's seed and position."""

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
    """One position that wants a token: its sampling, and its output position."""

    sampling: SamplingParams
    offset: int


def finite(logits: torch.Tensor) -> list[bool]:
    """Whether each row of (R, V) logits has a likeliest token: no NaN, no +inf, and not -inf throughout."""
    found: list[bool] = torch.isfinite(logits.amax(-1)).tolist()
    return found


def restricted(logits: torch.Tensor, rows: Seq[int], allowed: npt.NDArray[np.int32]) -> torch.Tensor:
    """A copy of (R, V) logits that is -inf in `rows` where the bits of `allowed` (rows, ceil(V / 32)) are 0."""
    bits = np.unpackbits(np.ascontiguousarray(allowed).view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[-1]]
    forbidden = torch.ones((len(rows), logits.shape[-1]), dtype=torch.bool)
    forbidden[:, : bits.shape[1]] = torch.from_numpy(bits == 0)
    made = logits.clone()
    made[list(rows)] = made[list(rows)].masked_fill(forbidden.to(logits.device), -torch.inf)
    return made


def distributions(logits: torch.Tensor, positions: Seq[Position]) -> torch.Tensor:
    """(R, V) probabilities after temperature and top-p; a greedy row has its one token."""
    rows = torch.zeros_like(logits)
    drawn = [i for i, p in enumerate(positions) if not p.sampling.greedy]
    greedy = [i for i, p in enumerate(positions) if p.sampling.greedy]
    if greedy:
        rows[greedy, logits[greedy].argmax(-1)] = 1.0
    if drawn:
        ids, kept = _kept(logits[drawn], [positions[i] for i in drawn])
        rows[drawn] = torch.zeros_like(kept).scatter(1, ids, kept / kept.sum(-1, keepdim=True))
    return rows


def choose(logits: torch.Tensor, positions: Seq[Position]) -> list[int]:
    """The next token of every row of (R, V) logits; of a row that is not `finite`, any token."""
    chosen = logits.argmax(-1)
    drawn = [i for i, p in enumerate(positions) if not p.sampling.greedy]
    if drawn:
        ids, kept = _kept(logits[drawn], [positions[i] for i in drawn])
        chances = torch.tensor(
            [uniform(positions[i].sampling.seed or 0, positions[i].offset) for i in drawn],
            dtype=torch.float64,
            device=logits.device,
        )
        total = kept.double().cumsum(-1)
        at = torch.searchsorted(total, (chances * total[:, -1])[:, None], right=True)
        last = ((kept > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
        chosen[drawn] = ids.gather(1, torch.minimum(at, last)).squeeze(1)
    found: list[int] = chosen.tolist()
    return found


def _kept(logits: torch.Tensor, positions: Seq[Position]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and probabilities (R, V), likeliest first, 0 for what top-p leaves out; not normalised again.

    Sound for every temperature over 0 and every top-p: logits are taken relative to the row's greatest before they are
    divided, so a temperature however small gives its limit, the likeliest tokens alone.
    """
    dtype, device = logits.dtype, logits.device
    least = torch.finfo(dtype).tiny  # a temperature below it would be 0 in this dtype, and 0 / 0 is no logit
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
    """Logprobs of (R, V) logits before temperature and top-p: the chosen token's, and the `counts[r]` likeliest."""
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
