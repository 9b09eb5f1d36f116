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
from penstock.worker.v1 import worker_pb2 as pb
from penstock.worker.v1 import worker_pb2_grpc
from services import errors, telemetry
from services import proto_codec as common
from services.channels import ChannelPool
from services.domain.errors import Overloaded, Unavailable
from services.domain.instances import InstanceRecord
from services.domain.mesh_view import MeshView
from services.domain.requests import ChatMessage, ChatPrompt, SamplingParams, TokenFrame, TokenLogprob
from services.state import MeshFeed, connect
from services.state.keys import Keys

SYNC_S = 5.0  # the mesh is waited for so long at the start; without Redis grades are Unavailable
GRADES_FIRST = 2**31 - 1  # priority: the shortest requests of all, and each lets another request go


class TierChat:
    """Chats with the least loaded worker of a tier, and with the next one where that is full or gone."""

    def __init__(self, tier: str, state_url: str, keys: Keys, timeout_s: float) -> None:
        self._tier, self._state_url, self._keys, self._timeout_s = tier, state_url, keys, timeout_s
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
        last: Exception | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                for record in self._candidates():
                    try:
                        return await self._generate(record, request)
                    except (Unavailable, Overloaded) as error:
                        last = error
        except TimeoutError:
            raise Unavailable(f"tier {self._tier} gave no grade within {self._timeout_s:g} s") from None
        raise Unavailable(f"tier {self._tier} has nobody who grades" + (f": {last}" if last else ""))

    def _candidates(self) -> list[InstanceRecord]:
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


def _choice(frames: list[TokenFrame]) -> dict[str, Any]:
    """The reply as a chat completion's choice."""

    def entry(logprob: TokenLogprob) -> dict[str, Any]:
        return {"token": logprob.token_bytes.decode("utf-8", "replace"), "logprob": logprob.logprob}

    positions = [position for frame in frames for position in frame.logprobs]
    content = [{**entry(p.chosen), "top_logprobs": [entry(top) for top in p.top]} for p in positions]
    return {"message": {"content": "".join(frame.text for frame in frames)}, "logprobs": {"content": content}}
