"""Logits on a GPU: whole rows stay there, what is drawn from comes to the host."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.worker_service.engine.logits import F32, I64, Bits, Ranked, forbidden_by


class DeviceLogits:
    """Logits in a tensor (R, V), as `HostLogits` has them."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    @property
    def vocabulary(self) -> int:
        return self.values.shape[-1]

    def rows(self, chosen: Seq[int]) -> "DeviceLogits":
        return DeviceLogits(self.values[list(chosen)])

    def best(self) -> tuple[list[int], list[bool]]:
        most, tokens = self.values.max(-1)
        return tokens.tolist(), most.isfinite().tolist()

    def changed(self, rows: I64, tokens: I64, divisors: F32, summands: F32) -> "DeviceLogits":
        at, token, divisor, summand = (self._moved(each) for each in (rows, tokens, divisors, summands))
        values, result = self.values[at, token], self.values.clone()
        result[at, token] = torch.where(values < 0, values * divisor, values / divisor) + summand
        return DeviceLogits(result)

    def restricted(self, rows: Seq[int], allowed: Bits) -> "DeviceLogits":
        forbidden, result = self._moved(forbidden_by(allowed, self.vocabulary)), self.values.clone()
        result[list(rows)] = result[list(rows)].masked_fill(forbidden, -torch.inf)
        return DeviceLogits(result)

    def ranked(self, temperatures: Seq[float], top: int) -> Ranked:
        least = torch.finfo(self.values.dtype).tiny
        divisors = self._moved(np.array([max(each, least) for each in temperatures], np.float32))
        probabilities = torch.softmax((self.values - self.values.amax(-1, keepdim=True)).div_(divisors[:, None]), -1)
        if top >= self.vocabulary:
            ranked, ids = probabilities.sort(stable=True, dim=-1, descending=True)
            sure = torch.full_like(ids[:, 0], self.vocabulary)
        else:
            best = probabilities.topk(top, -1, sorted=False)
            ids = best.indices.sort(-1).values
            values = probabilities.gather(1, ids)
            is_sure = values > best.values.amin(-1, keepdim=True)
            ranked, order = torch.where(is_sure, values, 0.0).sort(stable=True, dim=-1, descending=True)
            ids, sure = ids.gather(1, order), is_sure.sum(-1)
        return Ranked(*(each.cpu().numpy() for each in (ids, ranked, sure, probabilities.sum(-1))))

    def logprobs(self, chosen: Seq[int], top: int) -> tuple[list[float], list[list[int]], list[list[float]]]:
        values = torch.log_softmax(self.values, -1)
        own = values.gather(1, self._moved(np.array(chosen))[:, None]).squeeze(1).tolist()
        shown, ids = values.topk(min(top, self.vocabulary), -1)
        return own, ids.tolist(), shown.tolist()

    def _moved(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.values.device)
