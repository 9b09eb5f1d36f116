"""Hosts in network namespaces, on one bridge; nothing of this machine's own network is touched. Needs root."""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

PREFIX = "10.0.0."


@dataclass(frozen=True)
class NetworkHost:
    """A namespace with one address."""

    namespace: str
    address: str

    def command(self, *argv: str) -> list[str]:
        """The arguments that run a command on this host."""
        return ["ip", "netns", "exec", self.namespace, *argv]

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Drop every packet from and to the others, as long as the context lasts."""
        rules = [(chain, way, "eth0", "-j", "DROP") for chain, way in (("INPUT", "-i"), ("OUTPUT", "-o"))]
        for rule in rules:
            _run(*self.command("iptables", "-A", *rule))
        try:
            yield
        finally:
            for rule in rules:
                _run(*self.command("iptables", "-D", *rule))


@contextmanager
def network_hosts(count: int) -> Iterator[tuple[NetworkHost, ...]]:
    """So many hosts, 10.0.0.1 and so on, as long as the context lasts. Skips the test where that is not possible."""
    if os.getuid() or not shutil.which("ip") or not shutil.which("iptables"):
        pytest.skip("network namespaces need root, iproute2 and iptables")
    names = [f"ps{uuid.uuid4().hex[:6]}-{i}" for i in range(count + 1)]
    switch, hosts = names[0], [NetworkHost(name, f"{PREFIX}{i}") for i, name in enumerate(names) if i]
    with ExitStack() as stack:
        for name in names:
            if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
                pytest.skip("this system gives no network namespaces")
            stack.callback(_run, "ip", "netns", "del", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for i, host in enumerate(hosts):
            _run("ip", "-n", switch, "link", "add", f"port{i}", "type", "veth", "peer", "eth0", "netns", host.namespace)
            _run("ip", "-n", switch, "link", "set", f"port{i}", "master", "bridge", "up")
            _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _run("ip", "-n", host.namespace, "link", "set", "eth0", "up")
        yield tuple(hosts)


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, timeout=30)
