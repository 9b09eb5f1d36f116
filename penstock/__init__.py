"""Penstock's SDK: clients for a mesh that serves a cascade of language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock.client import *  # noqa: F403 - their one list is there


def __getattr__(name: str) -> Any:
    """The public names of the SDK, loaded at first use: the services are packages next to it and need no gRPC for that."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    client = import_module("penstock.client")
    if name not in client.NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(client, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("penstock.client").NAMES})
