"""Lets the SGLang wheel start on a machine without a GPU. Put this folder on PYTHONPATH, for that process alone.

Four independent parts, each a hook on a later import:
1. torchvision: the PyPI build is for CUDA, its C++ library does not load, and two operators go missing.
2. triton: where it is not installed, SGLang's own stub for machines without triton is used.
3. HiCache: host pools copy with plain torch instead of CUDA kernels, and nothing is pinned.
4. LoRA: its torch backend computes on a CPU, but pins what it would upload; nothing is pinned.
"""

import importlib.machinery
import importlib.util
import os
import platform
import sys


class _Once:
    """A finder that runs `before` when `name` is first looked for, then steps aside."""

    def __init__(self, name, before):
        self.name, self.before = name, before

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            sys.meta_path.remove(self)
            self.before()
        return


class _After:
    """A finder that patches modules right after their first import."""

    def __init__(self, patches):
        self.patches = patches

    def find_spec(self, name, path=None, target=None):
        patch = self.patches.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


def _define_torchvision_ops():
    import torch

    for op in ("nms", "qnms"):
        torch.library.define(f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _stub_triton():
    if importlib.util.find_spec("triton") is not None:
        return
    import torch

    origin = importlib.machinery.PathFinder.find_spec("sglang").origin
    path = os.path.join(os.path.dirname(origin), "_platform_stubs.py")
    spec = importlib.util.spec_from_file_location("_sgl_platform_stubs", path)
    stubs = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stubs)
    saved = sys.platform, platform.machine, torch.backends.mps.is_available
    try:  # the stub installs itself only where it believes it is needed
        sys.platform, platform.machine, torch.backends.mps.is_available = "darwin", (lambda: "arm64"), (lambda: True)
        stubs.install_platform_stubs()
    finally:
        sys.platform, platform.machine, torch.backends.mps.is_available = saved


class _UnpinnedTorch:
    """torch, but `pin_memory=True` is ignored and streams and events are the no-op CPU ones."""

    def __init__(self, torch):
        self._torch, self.cuda = torch, torch.cpu
        for name in ("empty", "zeros", "ones", "full", "tensor"):
            setattr(self, name, self._unpinned(getattr(torch, name)))

    @staticmethod
    def _unpinned(make):
        def call(*args, **kwargs):
            kwargs.pop("pin_memory", None)
            return make(*args, **kwargs)

        return call

    def __getattr__(self, name):
        return getattr(self._torch, name)


def _host_pool_memory(module):
    import torch

    def allocate(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
        if allocator is not None:
            return allocator.allocate(dims, dtype=dtype, device=device)
        return torch.empty(dims, dtype=dtype)

    module.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def _host_pool_copies(module):
    def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
        for source, target in zip(src_layers, dst_layers):
            target[dst_indices] = source[src_indices]

    module.transfer_kv_direct = transfer_kv_direct
    module.torch = _UnpinnedTorch(module.torch)


def _unpinned_lora(module):
    module.torch = _UnpinnedTorch(module.torch)
    module.torch.Tensor.pin_memory = lambda self, device=None: self


sys.meta_path[:0] = [
    _Once("torchvision", _define_torchvision_ops),
    _Once("sglang", _stub_triton),
    _After(
        {
            "sglang.srt.mem_cache.pool_host.common": _host_pool_memory,
            "sglang.srt.mem_cache.pool_host.mha": _host_pool_copies,
            "sglang.srt.lora.layers": _unpinned_lora,
            "sglang.srt.lora.lora": _unpinned_lora,
            "sglang.srt.lora.backend.torch_backend": _unpinned_lora,
        }
    ),
]
