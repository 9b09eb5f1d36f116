"""Asks a tier of this mesh, as a router would: the model that serves it grades.

Not through the router's own API: there a grade would wait for a place behind the very requests that wait for grades.
"""

import asyncio
import contextlib
import secrets
from contextlib import AsyncExitStack
from typing import Any

from grpc import aio

from judge_service.scorers.llm import MAX_TOKENS, TOP_LOGPROBS, Messages
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from services import errors, telemetry
from services import proto_codec as common
from services.channels import ChannelPool
from services.domain.errors import DeadlineExceeded, Overloaded, PenstockError, Unavailable
from services.domain.instances import InstanceRecord
from services.domain.mesh_view import MeshView
from services.domain.requests import ChatMessage, ChatPrompt, SamplingParams, TokenFrame, TokenLogprob
from services.state import MeshFeed, connect
from services.state.keys import Keys

SYNC_S = 5.0  # the mesh is waited for so long at the start; without Redis grades are Unavailable
GRADES_FIRST = 2**31 - 1  # priority: the shortest requests of all, and each lets another request go


class TierChat:
    """Chats with the least loaded worker of a tier, and with the next one where that is full or gone."""

    def __init__(self, tier: str, state_url: str, keys: Keys, timeout_s: float, *, places_per_worker: int = 1) -> None:
        """places_per_worker: grades that one worker is asked for at once. The tier may be slow because it also answers what
        could not be judged: the grades it is asked for must not grow with that."""
        self._tier, self._state_url, self._keys, self._timeout_s = tier, state_url, keys, timeout_s
        self._places = places_per_worker
        self._freed = asyncio.Event()  # a new one for each place that comes free
        self._view, self._stack = MeshView(), AsyncExitStack()
        self._asked: dict[str, int] = {}

    async def start(self) -> None:
        redis = connect(self._state_url)
        self._stack.push_async_callback(redis.aclose)
        self._channels = await self._stack.enter_async_context(ChannelPool())
        feed = await self._stack.enter_async_context(MeshFeed(redis, self._keys, self._view))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SYNC_S):
                await feed.synced.wait()

    async def close(self) -> None:
        await self._stack.aclose()

    async def ask(self, messages: Messages) -> dict[str, Any]:
        request = pb.GenerateRequest(
            request_id=f"grade-{secrets.token_hex(8)}",
            prompt=common.prompt_to_proto(ChatPrompt(tuple(ChatMessage(m["role"], m["content"]) for m in messages))),
            sampling=common.sampling_to_proto(
                SamplingParams(temperature=0.0, max_output_tokens=MAX_TOKENS, top_logprobs=TOP_LOGPROBS)
            ),
            priority=GRADES_FIRST,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._ask_in_turn(request)
        except TimeoutError:
            raise DeadlineExceeded(f"tier {self._tier} gave no grade within {self._timeout_s:g} s") from None

    async def _ask_in_turn(self, request: pb.GenerateRequest) -> dict[str, Any]:
        """Ask one worker after the other, each as soon as it has a place for a grade.

        Raises:
            Overloaded: all are full.
            Unavailable: nobody is there, or answers.
        """
        tried: set[str] = set()
        last: PenstockError | None = None
        while True:
            left = [record for record in self._candidates() if record.instance_id not in tried]
            if not left:
                break
            record = next((r for r in left if self._asked.get(r.instance_id, 0) < self._places), None)
            if record is None:
                await self._freed.wait()
                continue
            tried.add(record.instance_id)
            try:
                return await self._generate(record, request)
            except (Unavailable, Overloaded) as error:
                last = error
        if isinstance(last, Overloaded):
            raise last
        raise Unavailable(f"tier {self._tier} has nobody who grades" + (f": {last}" if last else ""))

    def _candidates(self) -> list[InstanceRecord]:
        """The tier's workers, the least loaded first."""

        def load(record: InstanceRecord) -> tuple[int, str]:
            told = record.load.requests if record.load is not None else 0
            return told + self._asked.get(record.instance_id, 0), record.instance_id

        return sorted(self._view.workers(self._tier), key=load)

    async def _generate(self, record: InstanceRecord, request: pb.GenerateRequest) -> dict[str, Any]:
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels.get(record.address))
        call = stub.Generate(request, timeout=self._timeout_s, metadata=telemetry.inject())
        self._asked[record.instance_id] = self._asked.get(record.instance_id, 0) + 1
        frames = list[TokenFrame]()
        try:
            while isinstance(response := await call.read(), pb.GenerateResponse):
                match response.WhichOneof("event"):
                    case "tokens":
                        frames.append(common.frame_from_proto(response.tokens))
                    case "finished":
                        return _choice(frames)
            raise Unavailable("the worker ended the stream in the middle")
        except aio.AioRpcError as error:
            raise errors.from_rpc(error) from error
        finally:
            call.cancel()
            self._asked[record.instance_id] -= 1
            if not self._asked[record.instance_id]:
                del self._asked[record.instance_id]
            self._freed_place()

    def _freed_place(self) -> None:
        """Wake who waits for a place."""
        self._freed.set()
        self._freed = asyncio.Event()


def _choice(frames: list[TokenFrame]) -> dict[str, Any]:
    """The reply as a chat completion's choice."""

    def entry(logprob: TokenLogprob) -> dict[str, Any]:
        return {"token": logprob.token_bytes.decode("utf-8", "replace"), "logprob": logprob.logprob}

    positions = [position for frame in frames for position in frame.logprobs]
    content = [{**entry(p.chosen), "top_logprobs": [entry(top) for top in p.top]} for p in positions]
    return {"message": {"content": "".join(frame.text for frame in frames)}, "logprobs": {"content": content}}
