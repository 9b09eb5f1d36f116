"""The simulated engine: the same scheduler, with a latency model instead of a language model."""

from worker_service.engine.simulated.engine import SimulatedEngineOptions, simulated_core, simulated_engine

__all__ = ["SimulatedEngineOptions", "simulated_core", "simulated_engine"]
