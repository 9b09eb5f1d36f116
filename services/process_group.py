"""Several processes of one service that serve as one: at the same ports, started, restarted and drained together.

The parent loads no gRPC and serves no requests. It holds what the processes share: the ports, the folder of their sockets and
the page of their metrics. It starts the processes by exec, never by fork alone. When the parent ends, for whatever reason,
each process gets SIGTERM and drains.
"""

import asyncio
import logging
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import NoReturn

from prometheus_client import CollectorRegistry

from penstock.services import telemetry
from penstock.services.background import end, supervise
from penstock.services.domain.instances import Role
from penstock.services.field_problems import SettingsError
from penstock.services.group_metrics import GroupMetrics
from penstock.services.process_heartbeat import HEARTBEAT_S, HeartbeatMonitor
from penstock.services.process_slot import ProcessSlot
from penstock.services.processes import UNUSABLE_SETTINGS, ProcessSpec, Watched, Watcher, free_port
from penstock.services.settings import ServiceSettings
from penstock.services.shared_port import SharedPort

_log = logging.getLogger(__name__)

MAX_CRASHES = 3
"""A group ends when each of its processes has crashed this often in a row: another restart would not help."""
STOP_MARGIN_S = 4.0  # beyond drain_s: for closing connections and sending the last spans
STUCK_S = 20.0
"""A process without a heartbeat for this long is killed: the kernel would keep giving it connections. SDK clients have left
its streams by then (`silence_s`, 15 s)."""
MAX_SOCKET_PATH_BYTES = 107  # of a Unix socket (sun_path)


def run_group(role: Role, module: str, settings: ServiceSettings, count: int) -> int:
    """Run `count` processes of a service, each as `python -m module --slot SLOT`, until SIGTERM or SIGINT.

    Returns:
        The exit status: 0 after a drain, 2 if no process can use the settings, 1 if no process stays up.

    Raises:
        SettingsError: A port is in use, or the path of the folder for temporary files is too long.
    """
    with ExitStack() as stack:
        host, group_id = settings.reachable_host, settings.instance_id or telemetry.make_instance_id(role.value, "")
        hosts = {"grpc_port": settings.bind_host, "http_port": settings.bind_host, "admin_port": settings.admin_host}
        ports = {name: _shared_port(settings, name, host, stack) for name, host in hosts.items()}
        metrics_ports = [free_port() for _ in range(count)]
        metrics = GroupMetrics(role.value, metrics_ports)
        metrics_address = f"{host}:{_serve_metrics(metrics, settings, stack)}"
        folder = _socket_folder(role, stack)
        slots = [ProcessSlot(group_id, index, count, folder, metrics_address) for index in range(count)]
        stop_s, specs = settings.drain_s + STOP_MARGIN_S, []
        for slot, metrics_port in zip(slots, metrics_ports, strict=True):
            own = {**ports, "metrics_port": metrics_port, "instance_id": slot.instance_id}
            env = {f"PENSTOCK_{name.upper()}": str(value) for name, value in own.items()}
            argv = [sys.executable, "-m", module, "--slot", slot.to_json()]
            specs.append(ProcessSpec(slot.instance_id, argv, env, log=None, stop_order=0, stop_s=stop_s))
        _log.info("%s: %d processes share the ports %s", group_id, count, ", ".join(map(str, ports.values())))
        return asyncio.run(_keep(slots, specs, metrics))


async def _keep(slots: Sequence[ProcessSlot], specs: Sequence[ProcessSpec], metrics: GroupMetrics) -> int:
    """Keep the processes running until a signal comes or none stays up; return the exit status."""
    over, loop, processes, status = asyncio.Event(), asyncio.get_running_loop(), metrics.processes, 0
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)

    def ended(_: Watched) -> None:
        nonlocal status
        started = len(processes) == len(specs)
        if started and not over.is_set() and min(process.crashes for process in processes) >= MAX_CRASHES:
            _log.critical("each process has ended %d times in a row: giving up", MAX_CRASHES)
            unusable = all(process.status == UNUSABLE_SETTINGS for process in processes)
            status = UNUSABLE_SETTINGS if unusable else 1
            over.set()

    # A process that cannot use its settings is restarted too: an edited mesh file must not end the processes that run.
    watcher = Watcher(ended, final=())
    async with AsyncExitStack() as stack:
        stack.push_async_callback(watcher.stop_all)
        for spec in specs:
            processes.append(await watcher.start(spec))
        stack.push_async_callback(end, supervise("stuck-processes", lambda: _kill_stuck(slots, processes)))
        await over.wait()
    return status


async def _kill_stuck(slots: Sequence[ProcessSlot], processes: Sequence[Watched]) -> NoReturn:
    """Kill a process whose heartbeats stop; the watcher starts it again."""
    monitors = [HeartbeatMonitor(round(STUCK_S / HEARTBEAT_S)) for _ in slots]
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        for slot, process, monitor in zip(slots, processes, monitors, strict=True):
            try:
                heartbeat = slot.heartbeat_file.stat().st_mtime_ns
            except OSError:
                heartbeat = None
            if monitor.is_stuck(process.pid, heartbeat):
                _log.error("%s has sent no heartbeat for %g s: killed", slot.instance_id, STUCK_S)
                assert process.process is not None
                process.process.kill()


def _shared_port(settings: ServiceSettings, name: str, host: str, stack: ExitStack) -> int:
    """Reserve the port of a setting until the stack is left; return it."""
    port: int = getattr(settings, name)
    try:
        shared = SharedPort(host, port)
    except OSError as error:
        raise SettingsError(f"{name}: cannot listen on {host}:{port}: {error.strerror}") from None
    stack.callback(shared.close)
    return shared.port


def _serve_metrics(metrics: GroupMetrics, settings: ServiceSettings, stack: ExitStack) -> int:
    """Start the server of the metrics page; return its port."""
    registry = CollectorRegistry()
    registry.register(metrics)
    server = telemetry.serve_metrics(registry, settings.bind_host, settings.metrics_port)
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    port: int = server.server_port
    return port


def _socket_folder(role: Role, stack: ExitStack) -> str:
    """Create a folder that only this user may access; it is removed when the stack is left."""
    folder = tempfile.mkdtemp(prefix=f"penstock-{role.value}-")
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    if len(f"{folder}/00.sock".encode()) > MAX_SOCKET_PATH_BYTES:
        raise SettingsError(f"TMPDIR: {tempfile.gettempdir()}: too long a path for Unix sockets")
    return folder
