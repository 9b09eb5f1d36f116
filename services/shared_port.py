"""A TCP port that several processes of one service listen on (SO_REUSEPORT), and that no other service can take.

With SO_REUSEPORT alone, two services of the same user could listen on one port without noticing, and each would get a part of
the connections. Therefore one process binds the port exclusively first, which fails if the port is in use, and allows sharing
only afterwards. It never listens: the kernel gives new connections to the processes that do.
"""

import socket


class SharedPort:
    """Reserves a port until it is closed. port: 0 takes any free port.

    Raises:
        OSError: The host is not an address of this machine, or the port is in use.
    """

    def __init__(self, host: str, port: int) -> None:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind, protocol)
        try:
            # Without it, closed connections of an earlier process (TIME_WAIT) would count as a use of the port.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            # From here on another reservation fails, and processes of this user may bind the port with SO_REUSEPORT.
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
        """Release the port; processes that listen on it are not affected."""
        self._socket.close()
