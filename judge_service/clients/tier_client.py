"""Sends grading requests to tiers of this mesh.

Not through a router: there, grading requests would wait in the queue of the requests that wait for their grades.
"""

import asyncio
import contextlib
import secrets
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

from penstock.judge_service.scoring.questions import REPLY_TOKENS, TOP_LOGPROBS, Messages
from penstock.mapper import write
from penstock.proto.common.v1 import common_pb2
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.services import errors, telemetry
from penstock.services import proto_codec as common
from penstock.services.access.certificates import CertificateFiles
from penstock.services.channels import ChannelPool
from penstock.services.domain.errors import DeadlineExceeded, Overloaded, PenstockError, Unavailable
from penstock.services.domain.instances import InstanceRecord
from penstock.services.domain.mesh_view import MeshView
from penstock.services.state.connection import connect
from penstock.services.state.feed import MeshFeed
from penstock.services.state.keys import Keys
from penstock.types.prompts import ChatMessage, ChatPrompt, Prompt
from penstock.types.replies import TokenFrame, TokenLogprob
from penstock.types.sampling import SamplingParams

SYNC_S = 5.0  # limit on waiting for the state of the mesh at the start; without it grades fail as Unavailable
GRADES_FIRST = 2**31 - 1  # highest priority: grading requests are short, and each releases another request


class TierChat:
    """Sends chats to the least loaded worker of a tier, or to the next one if that is full or unavailable."""

    def __init__(
        self,
        tier: str,
        state_url: str,
        keys: Keys,
        timeout_s: float | None,
        *,
        places_per_worker: int = 1,
        certificates: CertificateFiles | None = None,
        max_tokens: int = REPLY_TOKENS,
    ) -> None:
        """timeout_s: None: as long as the caller waits. max_tokens: of a grade, thoughts included.

        places_per_worker: concurrent grading requests per worker. They must stay bounded when the tier is slow, because it
        also answers the requests that could not be scored.
        """
        self._tier, self._state_url, self._keys, self._timeout_s = tier, state_url, keys, timeout_s
        self._slots_per_worker, self._max_tokens = places_per_worker, max_tokens
        self._slot_released = asyncio.Event()  # replaced whenever a slot is released
        self._view, self._stack = MeshView(), AsyncExitStack()
        self._certificates = certificates
        self._active = Counter[str]()

    async def start(self) -> None:
        redis = connect(self._state_url)
        self._stack.push_async_callback(redis.aclose)
        self._channels = await self._stack.enter_async_context(ChannelPool(self._certificates))
        feed = await self._stack.enter_async_context(MeshFeed(redis, self._keys, self._view))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SYNC_S):
                await feed.synced.wait()

    async def close(self) -> None:
        await self._stack.aclose()

    async def ask(self, messages: Messages) -> dict[str, Any]:
        chat = ChatPrompt(tuple(ChatMessage(m["role"], m["content"]) for m in messages))
        sampling = SamplingParams(temperature=0.0, max_tokens=self._max_tokens, top_logprobs=TOP_LOGPROBS)
        return await self._reply(self._tier, chat, sampling)

    async def sample(self, tier: str, prompt: Prompt, sampling: SamplingParams) -> str:
        """The text of a tier's reply. tier: empty for the client's own.

        Raises:
            Overloaded: All workers are full.
            DeadlineExceeded: There is no reply in time.
            Unavailable: There is no worker, or none responds.
        """
        choice = await self._reply(tier or self._tier, prompt, sampling)
        return str(choice["message"]["content"])

    async def _reply(self, tier: str, prompt: Prompt, sampling: SamplingParams) -> dict[str, Any]:
        """The reply of a tier as a choice of a chat completion."""
        request = pb.GenerateRequest(request_id=f"grade-{secrets.token_hex(8)}", priority=GRADES_FIRST)
        write(prompt, request.prompt)
        write(sampling, request.sampling)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._ask_in_turn(tier, request)
        except TimeoutError:
            raise DeadlineExceeded(f"tier {tier} gave no reply within {self._timeout_s or 0:g} s") from None

    async def _ask_in_turn(self, tier: str, request: pb.GenerateRequest) -> dict[str, Any]:
        """Try the workers in turn, each as soon as it has a free slot.

        Raises:
            Overloaded: All workers are full.
            Unavailable: There is no worker, or none responds.
        """
        tried: set[str] = set()
        last: PenstockError | None = None
        while True:
            candidates = [record for record in self._candidates(tier) if record.instance_id not in tried]
            if not candidates:
                break
            record = next((r for r in candidates if self._active[r.instance_id] < self._slots_per_worker), None)
            if record is None:
                await self._slot_released.wait()
                continue
            tried.add(record.instance_id)
            if record.model is not None and not record.model.gives_logprobs:
                request.sampling.ClearField("top_logprobs")
            try:
                return await self._generate(record, request)
            except (Unavailable, Overloaded) as error:
                last = error
        if isinstance(last, Overloaded):
            raise last
        raise Unavailable(f"tier {tier} has no worker for grading" + (f": {last}" if last else ""))

    def _candidates(self, tier: str) -> list[InstanceRecord]:
        """A tier's workers, least loaded first."""

        def load(record: InstanceRecord) -> tuple[int, str]:
            requests = record.load.requests if record.load is not None else 0
            return requests + self._active[record.instance_id], record.instance_id

        return sorted(self._view.workers(tier), key=load)

    async def _generate(self, record: InstanceRecord, request: pb.GenerateRequest) -> dict[str, Any]:
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels.get(record.address))
        call = stub.Generate(request, timeout=self._timeout_s, metadata=telemetry.inject())
        self._active[record.instance_id] += 1
        frames = list[TokenFrame]()
        try:
            with errors.of_calls():
                while isinstance(response := await call.read(), pb.GenerateResponse):
                    match response.WhichOneof("event"):
                        case "tokens":
                            frames.append(common.frame_from_proto(response.tokens))
                        case "finished":
                            if response.finished.reason == common_pb2.FINISH_REASON_ABORTED:
                                raise Unavailable("the worker aborted the grade")
                            return choice_of(frames)
            raise Unavailable("the worker ended the stream early")
        finally:
            call.cancel()
            self._active[record.instance_id] -= 1
            if not self._active[record.instance_id]:
                del self._active[record.instance_id]
            self._slot_released.set()
            self._slot_released = asyncio.Event()


def choice_of(frames: list[TokenFrame]) -> dict[str, Any]:
    """The reply as a choice of a chat completion."""

    def entry(logprob: TokenLogprob) -> dict[str, Any]:
        return {"token": logprob.token_bytes.decode("utf-8", "replace"), "logprob": logprob.logprob}

    positions = [position for frame in frames for position in frame.logprobs]
    content = [{**entry(p.chosen), "top_logprobs": [entry(top) for top in p.top]} for p in positions]
    return {"message": {"content": "".join(frame.text for frame in frames)}, "logprobs": {"content": content}}
