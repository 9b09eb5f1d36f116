"""Devices of workers. No I/O."""


def worker_device(device: str, index: int, each: int = 1) -> str:
    """The device of the worker with this index in its tier. With `cuda`, each worker takes the next `each` GPUs."""
    return f"cuda:{index * each}" if device == "cuda" else device
