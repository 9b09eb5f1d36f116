"""At which rate KV moves between two workers of one host, and what that costs in CPU time.

Two processes, each with a KV pool of the built-in engine on a CPU, and the workers' sender and receiver between them: whole
moves, with their opening, rounds, closing and hand-over, over gRPC. Three ways take turns in one run: `before` (torch's
gathers, every chunk copied into a message in the message of its step, and once more where it arrives),
`messages` (compiled copies; how KV moves between hosts) and `shared` (through memory that both processes share). Rates are by
wall-clock time and by the CPU time of both processes; with other work on the machine, only the latter mean anything.
"""

import asyncio
import json
import multiprocessing
import secrets
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np
import torch
from grpc import aio
from opentelemetry.metrics import NoOpMeter

from benchmarks import report
from benchmarks.cpu_time import cpu_s
from benchmarks.spread import median_and_range
from penstock.mapper import to_message
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.services.channels import CHANNEL_OPTIONS, server_options
from penstock.services.domain.instances import Role
from penstock.services.proto_codec import received
from penstock.types.prompts import TokenPrompt
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.workers import Admitted, HandedOver, KvChunk, KvLayout, ToTarget
from penstock.worker_service.clients.peer_client import PeerStream
from penstock.worker_service.engine.interface import Blocks, EngineEvent, KvTransferring, LastBlocks, Stopped
from penstock.worker_service.engine.torch.attention import KvPool, numbers
from penstock.worker_service.migration.receiver import KvReceiver
from penstock.worker_service.migration.sender import KvSender, Wire

SHAPES = {
    "models/family/medium": (KvLayout("medium", 6, 2, 32, 16, "float32"), 2048),
    "llama-3.2-3b": (KvLayout("llama", 28, 8, 128, 16, "bfloat16"), 1024),
}
"""Layouts, and tokens of a sequence that moves."""
WAYS = ("before", "messages", "shared")
MOVES = 3  # of one way in one round


class PoolEngine:
    """The KV of one sequence in a pool, which no model computes: what a migration needs of an engine."""

    def __init__(self, layout: KvLayout, tokens: int, *, compiled: bool) -> None:
        self._layout, self._count = layout, tokens
        blocks = -(-tokens // layout.block_tokens)
        kind = getattr(torch, layout.dtype)
        self._pool = KvPool(
            layout.layers, 2 * blocks, layout.block_tokens, layout.kv_heads, layout.head_dim, kind, "cpu"
        )
        assert self._pool.stacked is not None
        for array in self._pool.stacked:
            array[:] = np.arange(array[0, 0].size).reshape(array[0, 0].shape) % 251
            array[:, ::3] += array.dtype.type(1)
        self._compiled = compiled
        self._table = np.random.default_rng(1).permutation(2 * blocks)[:blocks].tolist()  # as in a pool that is in use
        self._copier = ThreadPoolExecutor(1)

    @property
    def kv_layout(self) -> KvLayout:
        return self._layout

    def _tokens(self) -> tuple[int, ...]:
        return tuple(range(self._count))

    async def computed_tokens(self, request_id: str) -> tuple[int, ...]:
        return self._tokens()

    def _read(self, first: int, blocks: int, out: Blocks | None) -> Blocks:
        if not self._compiled:
            return numbers(_gathered(self._pool, self._table[first : first + blocks]))
        into = None
        if out is not None:
            into = torch.from_numpy(out)
            into = into.view(torch.bfloat16) if self._layout.dtype == "bfloat16" else into
        return numbers(self._pool.read(self._table[first : first + blocks], into))

    async def read_kv(self, request_id: str, first_block: int, blocks: int, out: Blocks | None = None) -> Blocks:
        return await asyncio.wrap_future(self._copier.submit(self._read, first_block, blocks, out))

    async def pause(self, request_id: str, first_block: int) -> Stopped:
        data = self._read(first_block, len(self._table) - first_block, None)
        return Stopped((*self._tokens(), 0), 1, data)

    async def resume(self, request_id: str) -> None: ...

    async def leave(self, request_id: str) -> HandedOver:
        return HandedOver(1)

    async def reserve(self, transfer_id: str, layout: KvLayout, tokens: Sequence[int], cache_salt: str = "") -> int:
        return 0

    async def write_kv(self, transfer_id: str, first_block: int, data: Blocks) -> None:
        blocks = self._table[first_block : first_block + len(data)]
        write = self._pool.write if self._compiled else partial(_scattered, self._pool)
        await asyncio.wrap_future(self._copier.submit(write, blocks, data))

    async def prepare_entry(self, transfer_id: str, request: GenerationRequest) -> None: ...

    async def enter(
        self,
        transfer_id: str,
        request: GenerationRequest,
        tokens: Sequence[int],
        last: LastBlocks | None = None,
        on_tokens: Any = None,
    ) -> AsyncGenerator[EngineEvent, None]:
        if last is not None:
            await self.write_kv(transfer_id, last.first, last.data)
        yield Admitted(len(tokens), 1)

    async def release(self, transfer_id: str) -> None: ...

    def clear(self) -> None:
        for tensor in (*self._pool.k, *self._pool.v):
            tensor.zero_()

    def checksum(self) -> int:
        """Of the sequence's KV: equal on both sides after a move."""
        data = numbers(self._pool.read(self._table))
        return zlib.crc32(np.ascontiguousarray(data).data)


def _gathered(pool: KvPool, blocks: list[int]) -> torch.Tensor:
    """As blocks were read before: gathered, permuted and stacked twice."""
    at = torch.tensor(blocks, dtype=torch.long)
    layers = [
        torch.stack((k[at].permute(0, 3, 1, 2), v[at].permute(0, 2, 1, 3)), dim=1)
        for k, v in zip(pool.k, pool.v, strict=True)
    ]
    return torch.stack(layers, dim=1)


def _scattered(pool: KvPool, blocks: list[int], data: Blocks) -> None:
    """As blocks were written before: from memory of their own, permuted."""
    shape = (len(blocks), pool.layers, 2, pool.block_tokens, pool.kv_heads, pool.head_dim)
    tensor = torch.from_numpy(np.frombuffer(bytearray(data.data), data.dtype)).view(pool.k[0].dtype).reshape(shape)
    at = torch.tensor(blocks, dtype=torch.long)
    for layer, (k, v) in enumerate(zip(pool.k, pool.v, strict=True)):
        k[at] = tensor[:, layer, 0].permute(0, 2, 3, 1)
        v[at] = tensor[:, layer, 1].permute(0, 2, 1, 3)


class _Target:
    """Expects every transfer that comes."""

    def __init__(self, engine: KvTransferring) -> None:
        self._receiver = KvReceiver(engine, 2)

    def handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            "penstock.worker.v1.WorkerService",
            {
                "MigrateIn": grpc.stream_stream_rpc_method_handler(
                    self._migrate_in, pb.MigrateInRequest.FromString, pb.MigrateInResponse.SerializeToString
                )
            },
        )

    async def _migrate_in(
        self, request_iterator: AsyncIterator[pb.MigrateInRequest], context: object
    ) -> AsyncIterator[pb.MigrateInResponse]:
        opening = await anext(request_iterator)

        async def messages() -> AsyncIterator[ToTarget]:
            yield received(opening, ToTarget)
            async for message in request_iterator:
                yield received(message, ToTarget)

        request = GenerationRequest("r", TokenPrompt((1,)), SamplingParams())
        async with self._receiver.expect(opening.opening.transfer_id, request):
            async for answer in self._receiver.receive(messages()):
                yield to_message(answer, pb.MigrateInResponse)


class _BeforeStream(PeerStream):
    """Copies a chunk's data into a message, and this into the message of its step."""

    async def send(self, message: ToTarget) -> None:
        if isinstance(message, KvChunk):
            chunk = pb.KvChunk(first_block=message.first_block, blocks=message.blocks, data=message.data)
            await self._call.write(pb.MigrateInRequest(chunk=chunk))
        else:
            await super().send(message)


@dataclass(frozen=True, slots=True)
class _Sender:
    """A source with a channel to the target."""

    engine: PoolEngine
    sender: KvSender
    channel: aio.Channel
    address: str


def _receive(shape: str, compiled: bool, connection: Connection) -> None:
    """The target's process."""

    async def run() -> None:
        torch.set_num_threads(1)
        layout, tokens = SHAPES[shape]
        engine = PoolEngine(layout, tokens, compiled=compiled)
        server = aio.server(options=server_options(Role.WORKER))
        server.add_generic_rpc_handlers((_Target(engine).handler(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        connection.send(port)
        while (await asyncio.to_thread(connection.recv)) != "end":
            connection.send(engine.checksum())
        await server.stop(0)

    asyncio.run(run())


def _source(shape: str, way: str, port: int) -> _Sender:
    layout, tokens = SHAPES[shape]
    engine = PoolEngine(layout, tokens, compiled=way != "before")
    address = f"127.0.0.1:{port}"
    channel = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    kind = _BeforeStream if way == "before" else PeerStream

    @asynccontextmanager
    async def dial(_: str) -> AsyncGenerator[Wire, None]:
        call = stub.MigrateIn(timeout=120)
        try:
            yield kind(call)
        finally:
            call.cancel()

    sender = KvSender(engine, dial, NoOpMeter("benchmark"), 2, shares_memory=way == "shared")
    return _Sender(engine, sender, channel, address)


async def _move(source: _Sender) -> tuple[int, float]:
    """Bytes sent, and the pause in seconds."""
    sent, transfer_id = 0, secrets.token_hex(4)
    async for event in source.sender.move(f"r-{transfer_id}", transfer_id, source.address):
        if isinstance(event, HandedOver):
            return sent, event.stall_s
        sent = getattr(event, "sent_bytes", sent)
        if not hasattr(event, "sent_bytes"):
            raise RuntimeError(str(event))
    raise RuntimeError("the move did not end")


async def _warm_up(source: _Sender) -> None:
    """Move until a move succeeds: the first ones compile, and touch the pages of the pools, which may take seconds."""
    for _ in range(5):
        try:
            await _move(source)
            return
        except RuntimeError:
            await asyncio.sleep(1.0)
    await _move(source)


async def measure(shape: str, rounds: int) -> dict[str, Any]:
    """Rates of all ways, which take turns."""
    layout, tokens = SHAPES[shape]
    size = -(-tokens // layout.block_tokens) * layout.block_bytes
    spawn = multiprocessing.get_context("spawn")
    figures: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    targets: dict[str, Any] = {}
    sources: dict[str, _Sender] = {}
    try:
        for way in WAYS:
            here, there = spawn.Pipe()
            process = spawn.Process(target=_receive, args=(shape, way != "before", there))
            process.start()
            targets[way] = (process, here)
            sources[way] = _source(shape, way, await asyncio.to_thread(here.recv))
            await _warm_up(sources[way])
        for _ in range(rounds):
            for way in WAYS:
                process, here = targets[way]
                cpu, target_cpu, began = time.process_time(), cpu_s(process.pid), time.perf_counter()
                stalls = [(await _move(sources[way]))[1] for _ in range(MOVES)]
                wall_s = time.perf_counter() - began
                source_s = time.process_time() - cpu
                target_s = cpu_s(process.pid) - target_cpu
                here.send("checksum")
                if await asyncio.to_thread(here.recv) != sources[way].engine.checksum():
                    raise RuntimeError(f"{way}: the KV that arrived is not what was sent")
                row = {
                    "gb_per_s_wall": MOVES * size / wall_s / 1e9,
                    "gb_per_cpu_s": MOVES * size / (source_s + target_s) / 1e9,
                    "source_cpu_s": source_s,
                    "target_cpu_s": target_s,
                    "pause_ms": 1000 * max(stalls),
                    "estimate_gb_per_s": sources[way].sender.bandwidth.bytes_per_s / 1e9,
                }
                figures[way].append({name: round(value, 4) for name, value in row.items()})
            print(shape, json.dumps({way: figures[way][-1] for way in WAYS}), flush=True)
    finally:
        for source in sources.values():
            await source.channel.close()
        for process, here in targets.values():
            here.send("end")
            await asyncio.to_thread(process.join)
    middle = {
        way: {name: median_and_range([row[name] for row in rows])[0] for name in rows[0]}
        for way, rows in figures.items()
    }
    return {
        "layout": layout.__repr__(),
        "tokens": tokens,
        "bytes_per_move": size,
        "rounds": figures,
        "median": middle,
        "shared_over_before_wall": middle["shared"]["gb_per_s_wall"] / middle["before"]["gb_per_s_wall"],
        "shared_over_before_cpu": middle["shared"]["gb_per_cpu_s"] / middle["before"]["gb_per_cpu_s"],
    }


def run(rounds: int) -> None:
    torch.set_num_threads(1)
    shapes = {shape: asyncio.run(measure(shape, rounds)) for shape in SHAPES}
    for shape, figures in shapes.items():
        for way in WAYS:
            middle = figures["median"][way]
            print(f"{shape:<22}{way:<10}" + "  ".join(f"{name} {value:.3f}" for name, value in middle.items()))
    print(report.write("transport", {"moves_per_round": MOVES, "shapes": shapes}))
