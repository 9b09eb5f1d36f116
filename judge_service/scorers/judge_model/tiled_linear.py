"""Linear layers on one CPU thread, whose products torch computes at half the speed or less."""

from typing import Any

import numpy as np
import torch

from penstock.services import tiles

MODEL_TYPES = ("llama", "qwen2", "qwen3")
_NONE = np.empty(0, np.float32)


class TiledLinear(torch.nn.Module):
    """Replaces a linear layer in float32 on the CPU. Its result differs from torch's by rounding only."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self._panels = tiles.panels(linear.weight.data.numpy())
        self._bias = _NONE if linear.bias is None else linear.bias.data.numpy()
        self._outputs = linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., inputs) -> (..., outputs)."""
        rows = np.ascontiguousarray(x.reshape(-1, x.shape[-1]).numpy())
        out = np.empty((len(rows), self._outputs), np.float32)
        tiles.product(rows, self._panels, self._bias, out)
        return torch.from_numpy(out).view(*x.shape[:-1], self._outputs)


def use_tiles(model: Any) -> None:
    """Replace the linear layers below a model of transformers that only calls them, where the tiles were measured."""
    config = model.config
    on_cpu = model.device.type == "cpu" and model.dtype == torch.float32 and torch.get_num_threads() == 1
    if on_cpu and config.model_type in MODEL_TYPES:
        _replace(model)


def _replace(module: torch.nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear):
            setattr(module, name, TiledLinear(child))
        else:
            _replace(child)
