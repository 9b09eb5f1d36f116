"""Moves the indices of a step to the device in one copy."""

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch


def uploaded(arrays: Seq[npt.NDArray[np.int64]], device: torch.device) -> list[torch.Tensor]:
    """The arrays as int64 tensors on the device, of the same shapes.

    For a GPU they are packed into one pinned buffer, which is copied without waiting; CPU tensors share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    return unpacked(packed(arrays, pinned=device.type == "cuda").to(device, non_blocking=True), arrays)


def packed(arrays: Seq[npt.NDArray[np.int64]], *, pinned: bool) -> torch.Tensor:
    """All numbers of the arrays, one array after the other, in host memory."""
    buffer = torch.empty(sum(array.size for array in arrays), dtype=torch.int64, pin_memory=pinned)
    np.concatenate([array.ravel() for array in arrays], out=buffer.numpy())
    return buffer


def unpacked(buffer: torch.Tensor, arrays: Seq[npt.NDArray[np.int64]]) -> list[torch.Tensor]:
    """Views of a packed buffer in the arrays' shapes."""
    parts = buffer.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
