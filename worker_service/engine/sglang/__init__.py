"""The production engine: an SGLang server, used over HTTP."""

from worker_service.engine.sglang.engine import SglangEngine, SglangEngineOptions

__all__ = ["SglangEngine", "SglangEngineOptions"]
