"""`python -m tests.support.slot_process --slot SLOT`: a process of a group that tells its index to whoever connects.

CRASHES: indices of processes that end with status 1 at once, after a line in the file CRASH_LOG. UNUSABLE: likewise with
status 2. At SIGTERM it stops listening and ends with status 0.
"""

import os
import signal
import socket
import sys
import threading
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, start_http_server

from penstock.services.process_heartbeat import clean_up
from penstock.services.process_slot import ProcessSlot


def main() -> None:
    # Waited for below: a handler that sets an event deadlocks where it interrupts the wait for the same event.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    slot = ProcessSlot.from_json(sys.argv[sys.argv.index("--slot") + 1])
    if str(slot.index) in os.environ.get("CRASHES", ""):
        with Path(os.environ["CRASH_LOG"]).open("a") as log:
            log.write(f"{slot.index}\n")
        sys.exit(1)
    if str(slot.index) in os.environ.get("UNUSABLE", ""):
        sys.exit(2)
    registry = CollectorRegistry()
    Counter("served", "Connections.", registry=registry).inc(slot.index + 1)
    start_http_server(int(os.environ["PENSTOCK_METRICS_PORT"]), addr="127.0.0.1", registry=registry)
    for kind in ("GRPC", "HTTP"):
        listener = socket.create_server(("127.0.0.1", int(os.environ[f"PENSTOCK_{kind}_PORT"])), reuse_port=True)
        threading.Thread(target=serve, args=(listener, slot), daemon=True).start()
    parent = os.getppid()
    while signal.sigtimedwait({signal.SIGTERM}, 0.1) is None:
        slot.heartbeat_file.touch()
    clean_up(slot, parent)


def serve(listener: socket.socket, slot: ProcessSlot) -> None:
    while True:
        connection, _ = listener.accept()
        connection.sendall(f"{slot.index} {os.getpid()}".encode())
        connection.close()


if __name__ == "__main__":
    main()
