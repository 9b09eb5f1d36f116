"""The simulated engine: the same scheduler, with a latency model instead of a language model."""
