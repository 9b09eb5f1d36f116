"""Random ids and seeds from the operating system, read in blocks.

One read of `os.urandom` takes some microseconds however few bytes it returns, and a request needs several.
"""

import os

BLOCK_BYTES = 4096


class RandomBits:
    """Bytes of `os.urandom`, each given out once, also in a child process that is forked."""

    def __init__(self) -> None:
        self._block, self._at = b"", 0
        os.register_at_fork(after_in_child=self._forget)

    def hex(self, count: int) -> str:
        """`count` bytes, at most BLOCK_BYTES, as hexadecimal digits."""
        return self._take(count).hex()

    def below(self, power: int) -> int:
        """An integer from 0 to 2 to the power of `power`, exclusive."""
        count = -(-power // 8)
        return int.from_bytes(self._take(count), "big") >> (8 * count - power)

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._block):
            self._block, self._at, end = os.urandom(BLOCK_BYTES), 0, count
        taken = self._block[self._at : end]
        self._at = end
        return taken

    def _forget(self) -> None:
        self._block, self._at = b"", 0


random_bits = RandomBits()
"""Of this process; for its event loop's thread."""
