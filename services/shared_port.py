"""A TCP port that several processes of one service listen on (SO_REUSEPORT), and that nobody else can take.

SO_REUSEPORT alone would let two services of the same user listen on one port unnoticed, each with a part of the connections.
So one process binds the port first, as if for itself alone, which fails while anybody listens there, and only then lets
others in. It never listens: the kernel gives new connections to those that do.
"""

import socket


class SharedPort:
    """Holds a port until it is closed. host: where; port: 0 takes any free one.

    Raises:
        OSError: the host is not one of this machine, or somebody has the port.
    """

    def __init__(self, host: str, port: int) -> None:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind, protocol)
        try:
            # Connections of an earlier process may still be closing (TIME_WAIT): they are nobody who has the port.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            # From now on: a second holder finds the port taken, and who shares it with SO_REUSEPORT (same user) may bind.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError:
            self._socket.close()
            raise

    @property
    def port(self) -> int:
        number: int = self._socket.getsockname()[1]
        return number

    def close(self) -> None:
        """Let the port go; who listens there goes on."""
        self._socket.close()
