"""KV on its way: chunks in shared memory and in messages give the same KV, and a worker that cannot share gets messages."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.metrics import NoOpMeter

from benchmarks.transport import PoolEngine
from penstock.mapper import to_message
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.services.domain.errors import Unavailable
from penstock.services.proto_codec import received
from penstock.types.prompts import TokenPrompt
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.workers import (
    HandedOver,
    KvChunk,
    KvLayout,
    MoveReport,
    NotMoved,
    ToSource,
    ToTarget,
    TransferClosing,
    TransferOpening,
)
from penstock.worker_service.migration import outgoing
from penstock.worker_service.migration.bandwidth import LEAST_MOVED_BYTES, BandwidthEstimate
from penstock.worker_service.migration.receiver import KvReceiver
from penstock.worker_service.migration.segment import NotShared, TargetSegment
from penstock.worker_service.migration.sender import KvSender

LAYOUT = KvLayout("m", 2, 2, 32, 16, "float32")  # 16 KiB per block
TOKENS = 16 * 700 + 5  # 11 MB: more than the segment
REQUEST = GenerationRequest("r", TokenPrompt((1,)), SamplingParams())


def mapped() -> bool:
    """Whether this process has shared memory of a transfer."""
    return "penstock-kv" in Path("/proc/self/maps").read_text()


class LocalWire:
    """A stream to a receiver in this process; every message goes through protobuf."""

    def __init__(self, receiver: KvReceiver, seen: list[ToTarget], changed: dict[str, Any]) -> None:
        self._inbox: asyncio.Queue[ToTarget] = asyncio.Queue()
        self._receiver, self._seen, self._changed = receiver, seen, changed

    async def send(self, message: ToTarget) -> None:
        self._seen.append(message)
        if isinstance(message, TransferOpening) and message.shared is not None:
            message = replace(message, shared=replace(message.shared, **self._changed))
        proto = to_message(message, pb.MigrateInRequest)
        self._inbox.put_nowait(received(pb.MigrateInRequest.FromString(proto.SerializeToString()), ToTarget))

    async def _messages(self) -> AsyncIterator[ToTarget]:
        while True:
            yield await self._inbox.get()

    async def answers(self) -> AsyncIterator[ToSource]:
        async for answer in self._receiver.receive(self._messages()):
            yield received(to_message(answer, pb.MigrateInResponse), ToSource)


class Pair:
    """A sender and a receiver over pools of KV. changed: what of the segment's address is falsified on the way."""

    def __init__(self, tokens: int = TOKENS, shares: bool = True, changed: dict[str, Any] | None = None) -> None:
        self.source, self.target = (PoolEngine(LAYOUT, tokens, compiled=True) for _ in range(2))
        self.target.clear()
        self.receiver, self.seen = KvReceiver(self.target, 3), list[ToTarget]()
        self._changed = changed or {}
        self.sender = KvSender(self.source, self._dial, NoOpMeter("test"), 3, shares_memory=shares)

    @asynccontextmanager
    async def _dial(self, _: str) -> AsyncIterator[LocalWire]:
        yield LocalWire(self.receiver, self.seen, self._changed)

    async def move(self, name: str = "t") -> MoveReport:
        self.seen.clear()
        async with self.receiver.expect(name, REQUEST):
            *_, last = [report async for report in self.sender.move(name, name, "there")]
        return last

    @property
    def whole(self) -> bool:
        return self.source.checksum() == self.target.checksum()

    @property
    def chunks(self) -> list[KvChunk]:
        found = [m for m in self.seen if isinstance(m, KvChunk)]
        return found + [m.last for m in self.seen if isinstance(m, TransferClosing) and m.last is not None]


async def test_shared_chunks_carry_no_bytes_and_messages_carry_the_same_kv() -> None:
    shared, plain = Pair(), Pair(shares=False)
    assert not shared.whole
    for pair in (shared, plain):
        assert isinstance(await pair.move(), HandedOver)
        assert pair.whole
    assert all(c.shared_offset is not None and not c.data for c in shared.chunks)
    assert max(c.blocks for c in shared.chunks) * LAYOUT.block_bytes == outgoing.SHARED_CHUNK_BYTES
    assert all(c.shared_offset is None and c.data for c in plain.chunks)
    assert max(len(c.data) for c in plain.chunks) <= outgoing.CHUNK_BYTES
    assert [c.first_block for c in shared.chunks] == sorted(c.first_block for c in shared.chunks)


@pytest.mark.parametrize("changed", [{"process_id": 1}, {"descriptor": 9999}, {"size_bytes": 5 << 20}])
async def test_a_target_that_does_not_find_the_segment_gets_messages(changed: dict[str, int]) -> None:
    """As a worker of another host or container."""
    pair = Pair(changed=changed)
    assert isinstance(await pair.move(), HandedOver)
    assert pair.whole
    assert all(c.shared_offset is None for c in pair.chunks)
    assert max(len(c.data) for c in pair.chunks) <= outgoing.CHUNK_BYTES


async def test_little_kv_goes_in_a_message() -> None:
    pair = Pair(tokens=100)
    assert isinstance(await pair.move(), HandedOver)
    assert pair.whole
    assert isinstance(pair.seen[0], TransferOpening)
    assert pair.seen[0].shared is None


@pytest.mark.parametrize(("shares", "problem"), [(True, "not within"), (False, "no memory is shared")])
async def test_a_chunk_in_memory_that_is_not_shared_ends_the_transfer(shares: bool, problem: str) -> None:
    """And the request stays at its source."""
    pair = Pair(shares=shares)
    real = LocalWire.send

    async def forged(wire: LocalWire, message: ToTarget) -> None:
        if isinstance(message, KvChunk):
            message = replace(message, data=b"", shared_offset=60 << 20)
        await real(wire, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalWire, "send", forged)
        report = await pair.move()
    assert isinstance(report, NotMoved)
    assert problem in report.reason
    assert not pair.whole
    assert isinstance(await pair.move("again"), HandedOver)


@pytest.mark.parametrize("side", ["source", "target"])
async def test_a_fault_amid_a_transfer_leaves_the_request_at_its_source(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody expects: the source resumes the request, the target gives its reservation back."""
    pair, undone = Pair(shares=False), list[str]()

    def broken(*_: object) -> Any:
        raise RuntimeError("a bug")

    async def broken_later(*_: object) -> Any:
        broken()

    async def undo(request_id: str) -> None:
        undone.append(request_id)

    if side == "source":
        monkeypatch.setattr(pair.source, "read_kv", broken_later)
        monkeypatch.setattr(pair.source, "resume", undo)
    else:
        monkeypatch.setattr(pair.target, "write_kv", broken_later)
        monkeypatch.setattr(pair.target, "release", undo)
    report = await pair.move()
    assert isinstance(report, NotMoved)
    assert "internal error" in report.reason
    assert undone == ["t"]
    assert not pair.whole


async def test_a_target_that_dies_midway_leaves_nothing_open() -> None:
    """The source's transfer fails, and it holds neither the file nor the memory."""
    pair = Pair()
    real, sent = LocalWire.send, 0

    async def dies(wire: LocalWire, message: ToTarget) -> None:
        nonlocal sent
        sent += isinstance(message, KvChunk)
        if sent == 2:
            raise Unavailable("the target is gone")
        await real(wire, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalWire, "send", dies)
        report = await pair.move()
    assert report == NotMoved("the target is gone")
    opening = pair.seen[0]
    assert isinstance(opening, TransferOpening)
    assert opening.shared is not None
    pair.seen.clear()
    async with asyncio.timeout(60):
        while mapped():
            gc.collect()
            await asyncio.sleep(0.01)
    with pytest.raises(NotShared):
        TargetSegment(opening.shared)


def test_an_estimate_follows_moves_unless_it_is_set() -> None:
    estimate, fixed = BandwidthEstimate(), BandwidthEstimate(2e9)
    for each in (estimate, fixed):
        each.moved(LEAST_MOVED_BYTES - 1, 1.0)
    assert not estimate.bytes_per_s
    for each in (estimate, fixed):
        each.moved(LEAST_MOVED_BYTES, LEAST_MOVED_BYTES / 1e9)
        each.moved(LEAST_MOVED_BYTES, LEAST_MOVED_BYTES / 2e9)
        each.moved(LEAST_MOVED_BYTES, 0.0)
    assert estimate.bytes_per_s == pytest.approx(1.3e9)
    assert fixed.bytes_per_s == 2e9
