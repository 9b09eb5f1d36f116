"""Memory that two workers of one host share for the KV of one transfer.

The source creates an anonymous file in memory, and tells the target its process id, the number of the file's descriptor, its
size and a secret at the file's beginning. The target opens it through /proc. A target that finds the secret there
is on the same host, and sees the source's own processes; another host, another container or another user does not, and KV
then moves as bytes in messages.

What the target is told is not trusted. It opens nothing but a regular file of its own user, maps nothing but a file that can
neither shrink nor grow (sealed), of the announced size, within limits, and reads nothing without the secret. So an access
never leaves the file or fails halfway. The file has no name to guess, and the kernel frees it with the last of its processes.
"""

import fcntl
import hmac
import mmap
import os
import secrets
import stat
import weakref
from contextlib import ExitStack

from penstock.types.workers import KvChunk, KvLayout, SharedSegment

SECRET_BYTES = 32
HEADER_BYTES = mmap.PAGESIZE
"""Before the slots, so that these are aligned."""
MAX_SEGMENT_BYTES = 64 << 20


class NotShared(Exception):
    """Memory cannot be shared: KV moves in messages."""


class SourceSegment:
    """A segment of `slots` slots of `slot_bytes`, writable here. Its memory stays while arrays of it are in use."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        """Raises:
        NotShared: There is no memory, or the segment would be too large.
        """
        size = HEADER_BYTES + slot_bytes * slots
        if slot_bytes < 1 or slots < 1 or size > MAX_SEGMENT_BYTES:
            raise NotShared(f"{slots} slots of {slot_bytes} bytes are not within {MAX_SEGMENT_BYTES} bytes")
        secret = secrets.token_bytes(SECRET_BYTES)
        try:
            descriptor = os.memfd_create("penstock-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._close = weakref.finalize(self, os.close, descriptor)
            os.posix_fallocate(descriptor, 0, size)  # an error now instead of a signal at the first write
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._memory = memoryview(mmap.mmap(descriptor, size))
        except OSError as error:
            raise NotShared(f"no shared memory: {error}") from error
        self._memory[:SECRET_BYTES] = secret
        self.slot_bytes = slot_bytes
        self.address = SharedSegment(os.getpid(), descriptor, size, secret)
        self._slots, self._taken, self._given_back = slots, 0, 0  # slots are taken and given back in turn

    def take(self) -> int | None:
        """The offset of a free slot, which is in use now; None if there is none."""
        if self._taken - self._given_back == self._slots:
            return None
        self._taken += 1
        return HEADER_BYTES + (self._taken - 1) % self._slots * self.slot_bytes

    def memory(self, offset: int, size_bytes: int) -> memoryview:
        """The memory of a chunk that begins at a slot's offset."""
        return self._memory[offset : offset + size_bytes]

    def give_back(self) -> None:
        """Free the slot that was taken first: the target has read it, and it reads in order."""
        self._given_back += 1

    def close(self) -> None:
        """Close the file: no other process can open it any more. Idempotent."""
        self._close()


class TargetSegment:
    """A segment of another process, read-only here."""

    def __init__(self, address: SharedSegment) -> None:
        """Raises:
        NotShared: There is no such segment on this host, or it is not what was announced.
        """
        if not HEADER_BYTES < address.size_bytes <= MAX_SEGMENT_BYTES or len(address.secret) != SECRET_BYTES:
            raise NotShared("not the address of a segment")
        try:
            self._memory = memoryview(_mapped(address))
        except (OSError, ValueError) as error:
            raise NotShared(f"no such segment on this host: {error}") from error
        if not hmac.compare_digest(self._memory[:SECRET_BYTES], address.secret):
            raise NotShared("a segment of something else")

    def memory(self, offset: int, size_bytes: int) -> memoryview:
        """The memory of a chunk.

        Raises:
            ValueError: It is not within the segment.
        """
        if size_bytes < 0 or not HEADER_BYTES <= offset <= len(self._memory) - size_bytes:
            raise ValueError(f"{size_bytes} bytes at {offset} are not within the {len(self._memory)} shared ones")
        return self._memory[offset : offset + size_bytes]


def _mapped(address: SharedSegment) -> mmap.mmap:
    """Map the file at `address`, if it is a sealed one of this user and of that size."""
    path = f"/proc/{address.process_id:d}/fd/{address.descriptor:d}"
    with ExitStack() as stack:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)  # opens nothing yet: it may be a device, or a pipe that waits
        stack.callback(os.close, place)
        status = os.fstat(place)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size != address.size_bytes:
            raise ValueError("another kind of file")
        descriptor = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("it may shrink")
        return mmap.mmap(descriptor, address.size_bytes, access=mmap.ACCESS_READ)


def opened(address: SharedSegment | None) -> TargetSegment | None:
    """The segment that a source offers; None if this worker is not on its host, or has no part in it otherwise."""
    if address is None:
        return None
    try:
        return TargetSegment(address)
    except NotShared:
        return None


def content(chunk: KvChunk, layout: KvLayout, segment: TargetSegment | None) -> bytes | memoryview:
    """The bytes of a chunk.

    Raises:
        ValueError: They are not within the shared memory, or there is none.
    """
    if chunk.shared_offset is None:
        return chunk.data
    if segment is None:
        raise ValueError("shared_offset: no memory is shared")
    return segment.memory(chunk.shared_offset, chunk.blocks * layout.block_bytes)
