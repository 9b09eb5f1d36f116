"""A Redis, a replica of it, and three Sentinels, as processes."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.sentinel import MasterNotFoundError, Sentinel

from penstock.local import redis_server as local_redis
from penstock.services.processes import free_port
from tests.support.services import RedisProcess, redis_server

SERVICE = "state"
SENTINELS = 3
DOWN_AFTER_MS = 1000
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class SentinelRedis:
    """url: of the Sentinels. servers: the Redis and its replica, by port."""

    url: str
    servers: dict[int, RedisProcess]
    sentinel: Sentinel

    def primary(self) -> RedisProcess:
        """What the Sentinels name. Waits until they name one."""
        until = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return self.servers[self.sentinel.discover_master(SERVICE)[1]]  # type: ignore[no-untyped-call]
            except MasterNotFoundError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def until_replicated(self) -> None:
        """Wait until another server than the primary has its data and could take over."""
        until = time.monotonic() + TIMEOUT_S
        while True:
            with redis.Redis.from_url(self.primary().url) as client:
                replicas = client.info("replication")["connected_slaves"]
            known = self.sentinel.discover_slaves(SERVICE)  # type: ignore[no-untyped-call]
            if replicas == len(known) == 1:
                return
            if time.monotonic() > until:
                raise TimeoutError("there is no replica")
            time.sleep(0.05)


@contextmanager
def sentinel_redis(folder: Path) -> Iterator[SentinelRedis]:
    """All of them on loopback, the replica in step, as long as the context lasts."""
    binary, ports = local_redis.find(), [free_port() for _ in range(2 + SENTINELS)]
    with ExitStack() as stack:
        servers = dict[int, RedisProcess]()
        for port in ports[:2]:
            replica = ("--replicaof", f"127.0.0.1 {ports[0]}") if servers else ()
            options = ("--repl-diskless-sync-delay", "0", *replica)
            servers[port] = stack.enter_context(redis_server(binary, port, _folder(folder, port), *options))
        for port in ports[2:]:
            config = _folder(folder, port) / "sentinel.conf"
            config.write_text(_config(ports[0]))
            process = RedisProcess(binary, port, config.parent, sentinel=config)
            process.start()
            stack.callback(process.stop)
        addresses = [("127.0.0.1", port) for port in ports[2:]]
        sentinel = Sentinel(addresses, min_other_sentinels=SENTINELS - 1, socket_timeout=2.0)  # type: ignore[no-untyped-call]
        for each in sentinel.sentinels:
            stack.callback(each.close)
        made = SentinelRedis(url_of(ports[2:]), servers, sentinel)
        made.until_replicated()
        yield made


def url_of(ports: Sequence[int]) -> str:
    return f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in ports)}/{SERVICE}/0"


def _folder(folder: Path, port: int) -> Path:
    made = folder / str(port)
    made.mkdir()
    return made


def _config(primary: int) -> str:
    return (
        f"sentinel monitor {SERVICE} 127.0.0.1 {primary} {SENTINELS // 2 + 1}\n"
        f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
        f"sentinel failover-timeout {SERVICE} 10000\n"
    )
