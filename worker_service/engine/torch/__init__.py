"""The built-in engine on torch: model code and weights from Hugging Face transformers; CPU or GPU."""

from worker_service.engine.torch.engine import TorchEngineOptions, torch_engine

__all__ = ["TorchEngineOptions", "torch_engine"]
