"""Memory that two workers of one host share for the KV of one transfer."""

import fcntl
import gc
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from penstock.types.workers import SharedSegment
from penstock.worker_service.migration.segment import (
    HEADER_BYTES,
    MAX_SEGMENT_BYTES,
    SECRET_BYTES,
    NotShared,
    SourceSegment,
    TargetSegment,
)
from tests.support.present import present


def descriptors() -> set[str]:
    """What this process has open, files in memory only."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            name = str(entry.readlink())
        except OSError:
            continue
        if "penstock-kv" in name:
            found.add(f"{entry.name} {name}")
    return found


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("penstock-kv")


def _own(pipe: Connection) -> None:
    """A source in a process of its own."""
    segment = SourceSegment(4096, 2)
    offset = present(segment.take())
    segment.memory(offset, 4)[:] = b"abcd"
    pipe.send((segment.address, offset))
    pipe.recv()


def test_what_one_process_writes_another_reads_even_after_its_death() -> None:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    source = spawn.Process(target=_own, args=(there,))
    source.start()
    try:
        address, offset = here.recv()
        target = TargetSegment(address)
        assert bytes(target.memory(offset, 4)) == b"abcd"
        with pytest.raises(TypeError):
            target.memory(offset, 4)[0] = 1
        os.kill(present(source.pid), signal.SIGKILL)
        source.join()
        assert bytes(target.memory(offset, 4)) == b"abcd"
        with pytest.raises(NotShared):
            TargetSegment(address)
    finally:
        source.kill()
        source.join()


def test_nothing_is_left_when_both_sides_have_let_go() -> None:
    before = descriptors(), mappings()
    source = SourceSegment(4096, 2)
    target = TargetSegment(source.address)
    assert mappings() == before[1] + 2
    source.close()
    source.close()
    with pytest.raises(NotShared):
        TargetSegment(source.address)
    del source, target
    gc.collect()
    assert (descriptors(), mappings()) == before
    forgotten = SourceSegment(4096, 2)  # of a transfer that was cancelled before it knew of it
    assert descriptors() != before[0]
    del forgotten
    gc.collect()
    assert descriptors() == before[0]


def test_slots_are_given_back_in_the_order_in_which_they_were_taken() -> None:
    source = SourceSegment(4096, 2)
    first, second = source.take(), source.take()
    assert (first, second, source.take()) == (HEADER_BYTES, HEADER_BYTES + 4096, None)
    source.give_back()
    assert source.take() == first


def test_nothing_outside_the_segment_is_read() -> None:
    source = SourceSegment(4096, 2)
    target = TargetSegment(source.address)
    size = source.address.size_bytes
    assert len(target.memory(size - 10, 10)) == 10
    for offset, count in (
        (0, 10),
        (HEADER_BYTES - 1, 1),
        (size - 10, 11),
        (size, 1),
        (size + 4096, 0),
        (-1, 1),
        (HEADER_BYTES, -1),
    ):
        with pytest.raises(ValueError, match="not within"):
            target.memory(offset, count)


def test_too_much_memory_is_neither_made_nor_mapped() -> None:
    with pytest.raises(NotShared, match="not within"):
        SourceSegment(MAX_SEGMENT_BYTES, 2)
    with pytest.raises(NotShared, match="not within"):
        SourceSegment(0, 2)
    source = SourceSegment(4096, 2)
    for size in (0, HEADER_BYTES, MAX_SEGMENT_BYTES + 1, 1 << 63):
        with pytest.raises(NotShared):
            TargetSegment(replace(source.address, size_bytes=size))


def memory_file(size: int, seals: int, content: bytes = b"") -> int:
    descriptor = os.memfd_create("penstock-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, content, 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def address_of(descriptor: int, size: int) -> SharedSegment:
    return SharedSegment(os.getpid(), descriptor, size, bytes(SECRET_BYTES))


def test_the_address_of_anything_else_is_refused(tmp_path: Path) -> None:
    """Another process's number, another secret, a file on disk, a pipe, a socket, a directory, a file that may shrink."""
    source = SourceSegment(4096, 2)
    address, size = source.address, source.address.size_bytes
    for wrong in (
        replace(address, secret=bytes(SECRET_BYTES)),
        replace(address, secret=b""),
        replace(address, size_bytes=size - 1),
        replace(address, size_bytes=size + 1),
        replace(address, descriptor=10**6),
        replace(address, process_id=0),
        replace(address, process_id=2**31),
        replace(address, process_id=1),
    ):
        with pytest.raises(NotShared):
            TargetSegment(wrong)
    pipe, plug = os.pipe()
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(size))
    with socket.socket() as listener:
        makers: list[Callable[[], int]] = [
            lambda: os.open(plain, os.O_RDONLY),
            lambda: os.open(tmp_path, os.O_RDONLY),
            lambda: os.dup(pipe),
            lambda: os.dup(listener.fileno()),
            lambda: os.open("/dev/zero", os.O_RDONLY),
            lambda: memory_file(size, 0),
            lambda: memory_file(size, fcntl.F_SEAL_GROW),
        ]
        for make in makers:
            descriptor = make()
            with pytest.raises(NotShared):
                TargetSegment(address_of(descriptor, size))
            os.close(descriptor)
    os.close(pipe)
    os.close(plug)
    sealed = memory_file(size, fcntl.F_SEAL_SHRINK)
    TargetSegment(address_of(sealed, size))  # what is refused above is refused for what it lacks
    os.close(sealed)


def test_a_segment_cannot_be_cut_off_under_the_target() -> None:
    """Otherwise reading it would end the target's process with SIGBUS."""
    source = SourceSegment(4096, 2)
    target = TargetSegment(source.address)
    for size in (0, HEADER_BYTES, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(source.address.descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(source.address.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert len(bytes(target.memory(HEADER_BYTES, 4096))) == 4096
