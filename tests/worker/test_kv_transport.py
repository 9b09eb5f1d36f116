"""KV on its way: chunks in shared memory and in messages give the same KV, and a worker that cannot share gets messages."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.metrics import NoOpMeter

from benchmarks.transport import PoolEngine
from services.domain.errors import Unavailable
from services.domain.requests import GenerationRequest, SamplingParams, TokenPrompt
from worker_service import proto_codec as codec
from worker_service.engine.interface import KvLayout
from worker_service.migration import bandwidth, outgoing
from worker_service.migration.bandwidth import LEAST_MOVED_BYTES, BandwidthEstimate
from worker_service.migration.messages import Chunk, Closing, MovedOut, NotMoved, Opening, Report, ToSource, ToTarget
from worker_service.migration.receiver import KvReceiver
from worker_service.migration.segment import NotShared, TargetSegment, supported
from worker_service.migration.sender import KvSender
from worker_service.migration.source import Accepted, Failed, Received

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
        if isinstance(message, Opening) and message.shared is not None:
            message = replace(message, shared=replace(message.shared, **self._changed))
        proto = codec.to_target_to_proto(message)
        self._inbox.put_nowait(codec.to_target_from_proto(type(proto).FromString(proto.SerializeToString())))

    async def _messages(self) -> AsyncIterator[ToTarget]:
        while True:
            yield await self._inbox.get()

    async def answers(self) -> AsyncIterator[ToSource]:
        async for answer in self._receiver.receive(self._messages()):
            yield codec.to_source_from_proto(codec.to_source_to_proto(answer))


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

    async def move(self, name: str = "t") -> Report:
        self.seen.clear()
        async with self.receiver.expect(name, REQUEST):
            *_, last = [report async for report in self.sender.move(name, name, "there")]
        return last

    @property
    def whole(self) -> bool:
        return self.source.checksum() == self.target.checksum()

    @property
    def chunks(self) -> list[Chunk]:
        found = [m for m in self.seen if isinstance(m, Chunk)]
        return found + [m.last for m in self.seen if isinstance(m, Closing) and m.last is not None]


@pytest.mark.skipif(not supported(), reason="needs sealed files in memory, which Linux has")
async def test_shared_chunks_carry_no_bytes_and_messages_carry_the_same_kv() -> None:
    shared, plain = Pair(), Pair(shares=False)
    assert not shared.whole
    for pair in (shared, plain):
        assert isinstance(await pair.move(), MovedOut)
        assert pair.whole
    assert all(c.shared_offset is not None and not c.data for c in shared.chunks)
    assert max(c.blocks for c in shared.chunks) * LAYOUT.block_bytes == outgoing.SHARED_CHUNK_BYTES
    assert all(c.shared_offset is None and c.data for c in plain.chunks)
    assert max(len(c.data) for c in plain.chunks) <= outgoing.CHUNK_BYTES
    assert [c.first_block for c in shared.chunks] == sorted(c.first_block for c in shared.chunks)


@pytest.mark.parametrize("changed", [{"process_id": 1}, {"descriptor": 9999}, {"size_bytes": 5 << 20}])
async def test_a_target_that_does_not_find_the_segment_gets_messages(changed: dict[str, int]) -> None:
    """As a worker of another host or container; it is offered no memory again."""
    pair = Pair(changed=changed)
    assert isinstance(await pair.move(), MovedOut)
    assert pair.whole
    assert all(c.shared_offset is None for c in pair.chunks)
    assert max(len(c.data) for c in pair.chunks) <= outgoing.CHUNK_BYTES
    pair.target.clear()
    assert isinstance(await pair.move("again"), MovedOut)
    opening = pair.seen[0]
    assert isinstance(opening, Opening)
    assert opening.shared is None
    assert pair.whole


async def test_little_kv_goes_in_a_message() -> None:
    pair = Pair(tokens=100)
    assert isinstance(await pair.move(), MovedOut)
    assert pair.whole
    assert isinstance(pair.seen[0], Opening)
    assert pair.seen[0].shared is None


async def test_a_chunk_outside_the_segment_ends_the_transfer() -> None:
    """And the request stays at its source."""
    pair = Pair()
    real = LocalWire.send

    async def forged(wire: LocalWire, message: ToTarget) -> None:
        if isinstance(message, Chunk) and message.shared_offset is not None:
            message = replace(message, shared_offset=message.shared_offset + (60 << 20))
        await real(wire, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalWire, "send", forged)
        report = await pair.move()
    assert isinstance(report, NotMoved)
    assert "not within" in report.reason
    assert not pair.whole
    assert isinstance(await pair.move("again"), MovedOut)


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


@pytest.mark.skipif(not supported(), reason="needs sealed files in memory, which Linux has")
async def test_a_target_that_dies_midway_leaves_nothing_open() -> None:
    """The source's transfer fails, and it holds neither the file nor the memory."""
    pair = Pair()
    real, sent = LocalWire.send, 0

    async def dies(wire: LocalWire, message: ToTarget) -> None:
        nonlocal sent
        sent += isinstance(message, Chunk)
        if sent == 2:
            raise Unavailable("the target is gone")
        await real(wire, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalWire, "send", dies)
        report = await pair.move()
    assert report == NotMoved("the target is gone")
    opening = pair.seen[0]
    assert isinstance(opening, Opening)
    assert opening.shared is not None
    pair.seen.clear()
    async with asyncio.timeout(60):
        while mapped():
            gc.collect()
            await asyncio.sleep(0.01)
    with pytest.raises(NotShared):
        TargetSegment(opening.shared)


async def test_a_chunk_in_memory_that_was_never_shared_is_refused() -> None:
    pair = Pair(shares=False)
    real = LocalWire.send

    async def forged(wire: LocalWire, message: ToTarget) -> None:
        await real(wire, replace(message, data=b"", shared_offset=4096) if isinstance(message, Chunk) else message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalWire, "send", forged)
        report = await pair.move()
    assert isinstance(report, NotMoved)
    assert "no memory is shared" in report.reason


@pytest.mark.parametrize("shares", [True, False])
async def test_a_measurement_moves_zeros_and_is_bounded(shares: bool) -> None:
    pair = Pair(shares=shares)
    assert not pair.sender.bandwidth.known
    await pair.sender.measure("there")
    assert pair.sender.bandwidth.bytes_per_s > 0
    assert (
        sum(c.blocks for c in pair.chunks) * LAYOUT.block_bytes
        <= bandwidth.MEASURED_BYTES + outgoing.SHARED_CHUNK_BYTES
    )
    assert all(not any(c.data) for c in pair.chunks), "no user's KV"
    assert np.all(pair.target.pool_values() == 0), "nothing is written to the target's pool"


async def test_one_measurement_at_a_time_and_only_of_chunks_of_the_same_layout() -> None:
    pair = Pair()

    async def answers(*messages: ToTarget) -> list[ToSource]:
        async def sent() -> AsyncIterator[ToTarget]:
            for message in messages:
                yield message

        return [answer async for answer in pair.receiver.receive(sent())]

    opening = Opening("", LAYOUT, (), None, measurement=True)
    chunk = Chunk(0, 1, bytes(LAYOUT.block_bytes))
    assert await answers(opening, chunk) == [Accepted(0), Received(1)]
    assert await answers(opening, Chunk(0, 2, bytes(10))) == [Accepted(0), Failed("10 bytes for 2 blocks of 16384")]
    assert (await answers(opening, Closing((1,))))[-1] == Failed("a measurement has only chunks")
    [other] = await answers(replace(opening, layout=replace(LAYOUT, layers=3)))
    assert isinstance(other, Failed)
    endless = [*await answers(opening, *[chunk] * 9000)]
    assert endless[-1] == Failed(f"a measurement has at most {bandwidth.MAX_ABSORBED_BYTES} bytes")

    async def stuck() -> AsyncIterator[ToTarget]:
        yield opening
        await asyncio.Event().wait()

    first = pair.receiver.receive(stuck())
    assert await anext(first) == Accepted(0)
    with pytest.raises(Unavailable, match="another measurement"):
        await pair.sender.measure("there")
    await first.aclose()
    await pair.sender.measure("there")


def test_an_estimate_follows_moves_unless_it_is_set() -> None:
    estimate, fixed = BandwidthEstimate(), BandwidthEstimate(2e9)
    for each in (estimate, fixed):
        each.moved(LEAST_MOVED_BYTES - 1, 1.0)
    assert not estimate.known
    for each in (estimate, fixed):
        each.measured(1e9)
        each.moved(LEAST_MOVED_BYTES, LEAST_MOVED_BYTES / 2e9)
        each.moved(LEAST_MOVED_BYTES, 0.0)
    assert estimate.bytes_per_s == pytest.approx(1.3e9)
    assert fixed.bytes_per_s == 2e9
