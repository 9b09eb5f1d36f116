"""gRPC channels to other instances: one per address, shared, closed when the instance is gone."""

import json
import time
from contextlib import AbstractAsyncContextManager

from grpc import aio, ssl_channel_credentials

from penstock.services.access.certificates import SERVER_NAME, CertificateFiles
from penstock.services.domain.instances import Role

RETIRED_S = 900.0
"""How long calls may continue on a channel whose certificates were replaced: more than the usual deadline of a request."""
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""Size limit of a message between services."""
MAX_CLIENT_MESSAGE_BYTES = 8 * 1024 * 1024
"""Size limit of a message from a client to a router. A request grows on its way, by the tokens to resume after and by the
answer for the judge; at a quarter of the limit between services, every request that a router accepts can be forwarded."""

# Keepalive detects dead peers of open TCP connections. gRPC servers reject clients that ping more often than this.
KEEPALIVE_MS = 60_000

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also how long an attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # The caller chooses instances and retries itself, so a channel must not retry.
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
    """The gRPC options of a server with this role. shared_port: other processes of the same service listen there too."""
    limit = MAX_CLIENT_MESSAGE_BYTES if role is Role.ROUTER else MAX_MESSAGE_BYTES
    reuse_port = ("grpc.so_reuseport", int(shared_port))
    return (*_SERVER_OPTIONS, reuse_port, ("grpc.max_receive_message_length", limit))


class ChannelPool(AbstractAsyncContextManager["ChannelPool"]):
    """Channels by address, open as long as the context lasts.

    certificates: of this process, where services know each other by certificates.
    """

    def __init__(self, certificates: CertificateFiles | None = None) -> None:
        self._certificates = certificates
        self._channels: dict[str, tuple[aio.Channel, int]] = {}  # with the version of its certificates
        self._retired: list[tuple[float, aio.Channel]] = []

    def get(self, address: str, role: Role = Role.WORKER) -> aio.Channel:
        """The channel to a service at an address. With certificates, the service must have one of this role.

        After a change of the certificates it is a new channel; calls of the old one continue for `RETIRED_S`.
        """
        certificates = self._certificates.current() if self._certificates is not None else None
        version = certificates.version if certificates is not None else 0
        channel, known = self._channels.get(address, (None, 0))
        if channel is not None and known == version:
            return channel
        if channel is not None:
            self._retired.append((time.monotonic(), channel))
        if certificates is None:
            channel = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            name = ("grpc.ssl_target_name_override", SERVER_NAME.format(role=role.value))
            credentials = ssl_channel_credentials(certificates.authorities, certificates.key, certificates.chain)
            channel = aio.secure_channel(address, credentials, (*CHANNEL_OPTIONS, name))
        self._channels[address] = channel, version
        return channel

    async def keep(self, addresses: set[str]) -> None:
        """Close the channels to all other addresses, and old ones. Their calls fail."""
        for address in [a for a in self._channels if a not in addresses]:
            await self._channels.pop(address)[0].close()
        before_s = time.monotonic() - (RETIRED_S if addresses else 0.0)
        old = [channel for retired_s, channel in self._retired if retired_s <= before_s]
        self._retired = [(retired_s, channel) for retired_s, channel in self._retired if retired_s > before_s]
        for channel in old:
            await channel.close()

    async def __aexit__(self, *_: object) -> None:
        await self.keep(set())
