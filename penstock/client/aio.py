"""The asyncio clients."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from grpc import aio

from penstock.client import connection, errors, transport, types
from penstock.client.resumable import MISSED_HEARTBEATS, ResumableRequest, Routers
from penstock.client.retries import RetryBudget, RetryPolicy
from penstock.client.silence import LoopWatcher, SilenceWatch
from penstock.proto.planner.v1 import planner_pb2, planner_pb2_grpc
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc

_Response = TypeVar("_Response")


class AsyncClient:
    """Talks to one or several routers of a mesh.

    target: `host:port`; with several (a list, or separated by commas) another is used when one fails or refuses, also in the
        middle of a reply.
    timeout_s: Of a request, attempts and pauses included.
    retry: When a request is repeated.
    silence_s: A stream on which the router sends nothing for so long, not even a heartbeat, is given up, and the request
        goes on at another router. Where a router announces a heartbeat interval of more than a third of this, three times the
        interval counts; a router that announces none is waited for until the deadline.
    keepalive_s: Between two pings of a connection with calls under way, at least 10; finds half-open connections.

        async with AsyncClient("127.0.0.1:50051") as client:
            reply = await client.generate("What is 12 + 30?", temperature=0)
            print(reply.text, reply.tier)
    """

    def __init__(
        self,
        target: str | Sequence[str] = connection.USUAL_TARGET,
        *,
        timeout_s: float = connection.USUAL_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        silence_s: float = connection.USUAL_SILENCE_S,
        keepalive_s: float = connection.USUAL_KEEPALIVE_S,
    ) -> None:
        self._timeout_s, self._retry = timeout_s, retry or RetryPolicy()
        connection.check_limits(silence_s, keepalive_s)
        self._silence_s = silence_s
        options = connection.channel_options(keepalive_s)
        self._channels = [aio.insecure_channel(name, options=options) for name in connection.targets(target)]
        self._routers, self._budget = Routers(len(self._channels)), RetryBudget(self._retry)
        self._rng, self._closed = random.Random(), False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; what is under way fails."""
        self._closed = True
        for channel in self._channels:
            await channel.close()

    async def generate(
        self,
        prompt: types.Prompt,
        options: types.Options | None = None,
        *,
        timeout_s: float | None = None,
        **more: object,
    ) -> types.Reply:
        """Return the whole answer. `more` are fields of Options.

        Raises:
            PenstockError: The request failed; its classes say how.
        """
        request = self._request(prompt, options, more, timeout_s)
        async for _ in self._run(request):
            pass
        return request.reply()

    async def stream(
        self,
        prompt: types.Prompt,
        options: types.Options | None = None,
        *,
        timeout_s: float | None = None,
        **more: object,
    ) -> AsyncIterator[types.Event]:
        """Events as they come, Finished last. Leaving the iteration cancels the request."""
        async with aclosing(self._run(self._request(prompt, options, more, timeout_s))) as events:
            async for event in events:
                yield event

    async def models(self) -> list[types.Model]:
        """The models that requests may name."""
        answer = await self._ask(
            lambda number: self._router(number).ListModels(pb.ListModelsRequest(), timeout=connection.CALL_TIMEOUT_S)
        )
        return [transport.model_from_proto(model) for model in answer.models]

    async def status(self) -> types.MeshStatus:
        """The mesh as the router sees it."""
        answer = await self._ask(
            lambda number: self._mesh(number).GetStatus(pb.GetStatusRequest(), timeout=connection.CALL_TIMEOUT_S)
        )
        return transport.status_from_proto(answer.status)

    async def watch_status(self, interval_s: float = 1.0) -> AsyncIterator[types.MeshStatus]:
        """The status, again and again, until the iteration is left.

        Raises:
            PenstockError: The call failed, or nothing came for `silence_s` (or three intervals, where they are longer).
        """
        request = pb.WatchStatusRequest(interval=transport.duration(interval_s))
        call = self._mesh(self._routers.preferred).WatchStatus(request)
        loop, limit_s = asyncio.get_running_loop(), max(self._silence_s, MISSED_HEARTBEATS * interval_s)
        watch = SilenceWatch(lambda: limit_s)
        watcher, cancelling = LoopWatcher(watch, call), _cancelling()
        try:
            watcher.start()
            watch.waiting(loop.time())
            async for answer in call:
                watch.heard()
                yield transport.status_from_proto(answer.status)
                watch.waiting(loop.time())
        except asyncio.CancelledError:
            if not watch.silent or _cancelling() > cancelling:
                raise
            raise errors.silent(limit_s) from None
        except aio.AioRpcError as error:
            raise errors.from_rpc(error) from error
        finally:
            watcher.stop()
            call.cancel()

    async def traces(self, limit: int | None = None, trace_id: str | None = None) -> list[types.Trace]:
        """The last requests' traces, newest first, or one by its id."""
        request = pb.ListTracesRequest(limit_count=limit, trace_id=trace_id)
        answer = await self._ask(
            lambda number: self._mesh(number).ListTraces(request, timeout=connection.CALL_TIMEOUT_S)
        )
        return [transport.trace_from_proto(trace) for trace in answer.traces]

    async def move(self, request_id: str, instance_id: str) -> types.Move:
        """Have a reply that this client's router streams go on at another instance of its tier."""
        request = pb.MoveReplyRequest(request_id=request_id, instance_id=instance_id)
        try:
            answer = await self._mesh(self._routers.preferred).MoveReply(request, timeout=connection.MOVE_TIMEOUT_S)
        except aio.AioRpcError as error:
            raise errors.from_rpc(error) from error
        return transport.move_from_proto(answer)

    def _request(
        self, prompt: types.Prompt, options: types.Options | None, more: dict[str, object], timeout_s: float | None
    ) -> ResumableRequest:
        deadline_s = asyncio.get_running_loop().time() + (timeout_s if timeout_s is not None else self._timeout_s)
        merged = connection.merged(options, more)
        return ResumableRequest(prompt, merged, self._retry, self._routers, self._budget, deadline_s, self._rng)

    async def _run(self, request: ResumableRequest) -> AsyncGenerator[types.Event, None]:
        loop = asyncio.get_running_loop()
        while not request.finished:
            while (wait_s := request.wait_s(loop.time())) > 0:
                await asyncio.sleep(wait_s)
            if self._closed:
                raise errors.client_closed()
            message, timeout_s = request.message(), max(0.0, request.deadline_s - loop.time())
            call = self._router(request.router).Generate(message, timeout=timeout_s)
            watch = SilenceWatch(partial(request.silence_s, self._silence_s))
            watcher, cancelling = LoopWatcher(watch, call), _cancelling()
            try:
                watcher.start()
                watch.waiting(loop.time())
                async for response in call:
                    watch.heard()
                    event = request.take(response)
                    watcher.start()
                    if event is not None:
                        yield event
                    watch.waiting(loop.time())
                request.ended()
            except asyncio.CancelledError:
                # gRPC raises it in the reader also where the call was cancelled, and not the reader's task.
                if _cancelling() > cancelling:
                    raise
                if self._closed:
                    raise errors.client_closed() from None
                if not watch.silent:
                    raise
                request.failed(errors.silent(watch.limit_s() or self._silence_s), loop.time())
            except aio.AioRpcError as error:
                request.failed(errors.from_rpc(error), loop.time())
            except errors.UnavailableError as error:
                request.failed(error, loop.time())
            finally:
                watcher.stop()
                call.cancel()

    def _router(self, number: int) -> "router_pb2_grpc.RouterServiceAsyncStub":
        return router_pb2_grpc.RouterServiceStub(self._channels[number])

    def _mesh(self, number: int) -> "router_pb2_grpc.MeshServiceAsyncStub":
        return router_pb2_grpc.MeshServiceStub(self._channels[number])

    async def _ask(self, ask: Callable[[int], Awaitable[_Response]]) -> _Response:
        """Ask the preferred router; where it is away or does not answer, the others."""
        *others, last = self._routers.in_order()
        for number in others:
            try:
                return await ask(number)
            except aio.AioRpcError as error:
                failure = errors.from_rpc(error)
                if not isinstance(failure, errors.UnavailableError | errors.DeadlineError):
                    raise failure from error
                self._routers.failed(number)
        try:
            return await ask(last)
        except aio.AioRpcError as error:
            raise errors.from_rpc(error) from error


def _cancelling() -> int:
    """How often the current task has been asked to end."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


class AsyncPlannerClient:
    """Talks to the planner: reads, sets and watches the plan."""

    def __init__(self, target: str) -> None:
        self._channel = aio.insecure_channel(target, options=connection.OPTIONS)
        self._stub: planner_pb2_grpc.PlannerServiceAsyncStub = planner_pb2_grpc.PlannerServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def get_plan(self, revision: int | None = None) -> types.Plan:
        """The plan of a revision, or the current one. NotFoundError."""
        try:
            answer = await self._stub.GetPlan(
                planner_pb2.GetPlanRequest(revision=revision), timeout=connection.CALL_TIMEOUT_S
            )
        except aio.AioRpcError as error:
            raise errors.from_rpc(error) from error
        return transport.plan_from_proto(answer.plan)

    async def list_plans(self, limit: int | None = None) -> list[types.Plan]:
        """The last revisions, newest first."""
        request = planner_pb2.ListPlansRequest(limit_count=limit)
        try:
            answer = await self._stub.ListPlans(request, timeout=connection.CALL_TIMEOUT_S)
        except aio.AioRpcError as error:
            raise errors.from_rpc(error) from error
        return [transport.plan_from_proto(plan) for plan in answer.plans]

    async def set_plan(self, plan: types.Plan, *, expected_revision: int | None = None) -> types.Plan:
        """Make a plan current; return it with its revision. InvalidRequestError, ConflictError."""
        request = planner_pb2.SetPlanRequest(plan=transport.plan_to_proto(plan), expected_revision=expected_revision)
        try:
            answer = await self._stub.SetPlan(request, timeout=connection.CALL_TIMEOUT_S)
        except aio.AioRpcError as error:
            raise errors.from_rpc(error) from error
        return transport.plan_from_proto(answer.plan)

    async def plan_cascade(
        self,
        inputs: types.PlanningInputs,
        *,
        min_quality: float | None = None,
        max_latency_s: float | None = None,
        objective: str = "largest-tier",
        confidence: float | None = None,
        gpus: int | None = None,
        budget: str = "at-most",
    ) -> AsyncIterator[types.PlanProgress | types.CascadePlan | types.Unreachable]:
        """Let the planner compute a plan; leaving the iteration stops it. Progress, then a CascadePlan or Unreachable.

        Nothing is published. objective: largest-tier or end-to-end. budget: at-most so many GPUs, or exact.
        InvalidRequestError, ValueError.
        """
        call = self._stub.PlanCascade(
            transport.plan_request(inputs, min_quality, max_latency_s, objective, confidence, gpus, budget)
        )
        try:
            async for answer in call:
                yield transport.plan_event_from_proto(answer)
        except aio.AioRpcError as error:
            raise errors.from_rpc(error) from error
        finally:
            call.cancel()

    async def plan_stages(
        self,
        tier: str,
        *,
        kv_bytes_per_token: float,
        bandwidth_bytes_per_s: float,
        instances: int | None = None,
        qoe: Sequence[float] = (),
        sequences: Iterable[types.SequenceInFlight] = (),
        max_tokens: int | None = None,
        publish: bool = False,
    ) -> types.StageLayout:
        """Lay a tier's instances out as length stages; publish the layout as a plan revision if asked.

        Left out: instances and qoe (D0 to D4, seconds) are the plan's, sequences what the tier's instances hold now,
        max_tokens their context. InvalidRequestError, ConflictError, ValueError.
        """
        request = transport.stages_request(
            tier, instances, qoe, sequences, kv_bytes_per_token, bandwidth_bytes_per_s, max_tokens, publish
        )
        try:
            answer = await self._stub.PlanStages(request, timeout=connection.USUAL_TIMEOUT_S)
        except aio.AioRpcError as error:
            raise errors.from_rpc(error) from error
        return transport.stage_layout_from_proto(answer)

    async def simulate_deployment(
        self,
        inputs: types.PlanningInputs,
        replicas: Sequence[Sequence[types.ReplicaGroup]],
        thresholds: Sequence[float | None],
    ) -> types.Simulation:
        """Run replicas of each tier over a workload in virtual time. thresholds: of each tier but the last; None passes over.

        InvalidRequestError, ValueError.
        """
        request = transport.simulate_request(inputs, replicas, thresholds)
        try:
            answer = await self._stub.SimulateDeployment(request, timeout=connection.USUAL_TIMEOUT_S)
        except aio.AioRpcError as error:
            raise errors.from_rpc(error) from error
        return transport.simulation_from_proto(answer)

    async def watch_plan(self, after_revision: int | None = None) -> AsyncIterator[types.Plan]:
        """The current plan, then every later one, until the iteration is left."""
        call = self._stub.WatchPlan(planner_pb2.WatchPlanRequest(after_revision=after_revision))
        try:
            async for answer in call:
                yield transport.plan_from_proto(answer.plan)
        except aio.AioRpcError as error:
            raise errors.from_rpc(error) from error
        finally:
            call.cancel()
