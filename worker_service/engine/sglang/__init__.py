"""The production engine: a running SGLang server, spoken to over HTTP."""

from worker_service.engine.sglang.engine import SglangEngine, SglangEngineOptions

__all__ = ["SglangEngine", "SglangEngineOptions"]
