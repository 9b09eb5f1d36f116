"""What an engine around an SGLang server can do, from the server's flags. No I/O."""

from collections.abc import Iterator

from penstock.worker_service.engine.interface import Capability
from penstock.worker_service.engine.sglang.client import ServerInfo


def capabilities(server: ServerInfo, *, keeps_slos: bool, adapted: bool) -> Iterator[Capability]:
    """The capabilities of this server. adapted: its requests use a LoRA adapter."""
    if keeps_slos:
        yield Capability.SLO_PREDICTED
    if adapted:
        yield Capability.ADAPTER
    yield Capability.LOGPROBS
    if server.grammars:
        yield Capability.STRUCTURED_OUTPUT
    if server.prefix_cache:
        yield Capability.PREFIX_REUSE
        yield Capability.PREFIX_TRANSFER
    if server.seeded:
        yield Capability.SEEDED_SAMPLING
    if server.priorities:
        yield Capability.PRIORITIES
