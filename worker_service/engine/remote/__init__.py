"""An endpoint of OpenAI's API as an engine."""

from worker_service.engine.remote.engine import DEFAULT_REMOTE_CONTEXT, RemoteEngine, RemoteEngineOptions

__all__ = ["DEFAULT_REMOTE_CONTEXT", "RemoteEngine", "RemoteEngineOptions"]
