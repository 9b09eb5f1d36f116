"""Channels to other instances: one per address, shared, closed when the instance is gone."""

import json
from contextlib import AbstractAsyncContextManager
from types import TracebackType

from grpc import aio

from services.domain.instances import Role

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""Of one message between services."""
MAX_CLIENT_MESSAGE_BYTES = 8 * 1024 * 1024
"""Of what a router takes from a client. A request grows on its way, by tokens to go on behind and by the answer that a judge
reads: at a quarter of what services take from each other, whatever a router has taken can be sent on."""

# Keepalive finds dead peers behind live TCP connections; gRPC servers punish clients that ping more often than this.
KEEPALIVE_MS = 60_000

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Instances are chosen by us and tried one after the other: a channel must not retry behind our back.
    ("grpc.enable_retries", 0),
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"pick_first": {}}]})),
    ("grpc.use_local_subchannel_pool", 1),
)

_SERVER_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)


def server_options(role: Role, *, shared_port: bool = False) -> tuple[tuple[str, int | str], ...]:
    """What a server of this role is made with. shared_port: other processes of the same service listen there, too."""
    limit = MAX_CLIENT_MESSAGE_BYTES if role is Role.ROUTER else MAX_MESSAGE_BYTES
    reuse_port = ("grpc.so_reuseport", int(shared_port))
    return (*_SERVER_OPTIONS, reuse_port, ("grpc.max_receive_message_length", limit))


class ChannelPool(AbstractAsyncContextManager["ChannelPool"]):
    """Channels by address, as long as the context lasts."""

    def __init__(self) -> None:
        self._channels: dict[str, aio.Channel] = {}

    def get(self, address: str) -> aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return channel

    async def keep(self, addresses: set[str]) -> None:
        """Close the channels to all other addresses; calls on them fail."""
        for address in [a for a in self._channels if a not in addresses]:
            await self._channels.pop(address).close()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.keep(set())
