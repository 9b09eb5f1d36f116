"""The embedded engine: model code and weights through Hugging Face transformers, everything else ours; CPU or GPU."""

from worker_service.engine.torch.engine import TorchEngineOptions, torch_engine

__all__ = ["TorchEngineOptions", "torch_engine"]
