"""`python -m tests.support.mortal NAME=POINT ...`: services that kill themselves, with SIGKILL, at a message.

One process imports everything and forks a worker or a router for each NAME (which begins with `worker` or `router`). POINT is
`send:KIND` (just before such a message would leave) or `receive:KIND` (just after one has come); KIND is a message of a move
by the name of its class. Or it is `prompt:TEXT`: a worker dies of a request whose prompt has this text in it. Each death is
told on stdout. The settings are the environment's, as for the services themselves.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from penstock.router_service.clients import worker_client
from penstock.router_service.compose import compose as router
from penstock.services import proto_codec as common
from penstock.services.domain.instances import Role
from penstock.services.runtime import run_service
from penstock.worker_service import proto_codec as codec
from penstock.worker_service import servicer
from penstock.worker_service.clients import peer_client
from penstock.worker_service.compose import compose as worker

PR_SET_PDEATHSIG = 1

seen: set[str] = set()  # kinds that have passed


def dying(function: Callable[..., Any], way: str, point: str) -> Callable[..., Any]:
    """A function that maps values and messages, which kills the process at its point."""

    def call(given: Any, *kind_of: Any) -> Any:
        found = function(given, *kind_of)
        kind = type(given if way == "send" else found).__name__
        seen.add(kind)
        usual = kind == "Admitted" and "TransferOpening" not in seen  # of a reply that did not come by a move
        if f"{way}:{kind}" == point and not usual:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    return call


def poisoned(function: Callable[[Any], Any], text: str) -> Callable[[Any], Any]:
    """The codec's `request_from_proto`, which kills the process at a prompt with this text."""

    def call(given: Any) -> Any:
        if text in str(given.prompt):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(given)

    return call


def serve(name: str, point: str) -> None:
    os.environ["PENSTOCK_INSTANCE_ID"] = name
    if point.startswith("prompt:"):
        codec.request_from_proto = poisoned(codec.request_from_proto, point.partition(":")[2])  # type: ignore[assignment]
        run_service(Role.WORKER, worker)
    elif name.startswith("worker"):
        ways = {
            "send": ((servicer, "to_message"), (peer_client, "to_message"), (codec, "event_to_proto")),
            "receive": ((common, "received"), (peer_client, "received")),
        }
        for way, places in ways.items():
            for module, function in places:
                setattr(module, function, dying(getattr(module, function), way, point))
        run_service(Role.WORKER, worker)
    else:
        for function in ("_event", "from_message"):
            setattr(worker_client, function, dying(getattr(worker_client, function), "receive", point))
        run_service(Role.ROUTER, router)


def main() -> None:
    parent, children = os.getpid(), dict[int, str]()
    for name, _, point in (argument.partition("=") for argument in sys.argv[1:]):
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                serve(name, point)
            os._exit(1)
        children[child] = name
    while children:
        child, status = os.wait()
        print(children.pop(child), "killed" if os.WIFSIGNALED(status) else "ended", flush=True)


if __name__ == "__main__":
    main()
