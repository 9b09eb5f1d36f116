"""The asyncio clients."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from grpc import aio

from penstock.client import connection, errors, mesh_status, plans, types
from penstock.client.messages import generation, mesh, planning, served_plan, times
from penstock.client.resumable import MISSED_HEARTBEATS, ResumableRequest, RouterFailover, Routers
from penstock.client.retries import RetryBudget, RetryPolicy
from penstock.client.silence import LoopWatcher, SilenceWatch
from penstock.proto.planner.v1 import planner_pb2, planner_pb2_grpc
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc

_Response = TypeVar("_Response")


class AsyncClient:
    """A client of one or several routers of a mesh.

    target: `host:port`. With several (a list, or separated by commas), the client fails over to another when one fails or
        refuses, even in the middle of a reply.
    admin: `host:port` of the routers' administrative listeners, for `status`, `watch_status`, `traces` and `move`.
    api_key: Key of the requests. metadata: further metadata of the requests, in lower case. tls: None: without TLS.
    timeout_s: Deadline of a request, including retries and delays.
    retry: The retry policy of requests.
    silence_s: When a router sends nothing for this long, not even a heartbeat, the request continues at another router. The
        limit is at least three of the heartbeat intervals that the router announces; a router that announces none has no
        limit.
    keepalive_s: Interval between pings on a connection with active calls, at least 10; detects half-open connections.
    load_balancing: pick_first: requests go to one router until it fails. round_robin: to all of them in turn, except those
        that failed.
    interceptors: gRPC's client interceptors, for the calls of routers.
    context_metadata: called for each request, in the context of its caller: what it returns is metadata of the request's
        calls. With `opentelemetry.propagate.inject` it carries the caller's trace.

        async with AsyncClient("127.0.0.1:50051") as client:
            reply = await client.generate("What is 12 + 30?", temperature=0)
            print(reply.text, reply.tier)
    """

    def __init__(
        self,
        target: str | Sequence[str] = connection.DEFAULT_TARGET,
        *,
        admin: str | Sequence[str] = (),
        api_key: str | None = None,
        metadata: Mapping[str, str] | None = None,
        tls: connection.Tls | None = None,
        timeout_s: float = connection.DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        silence_s: float = connection.DEFAULT_SILENCE_S,
        keepalive_s: float = connection.DEFAULT_KEEPALIVE_S,
        load_balancing: connection.LoadBalancing = "pick_first",
        interceptors: Sequence[aio.ClientInterceptor] = (),
        context_metadata: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        self._timeout_s, self._retry = timeout_s, retry or RetryPolicy()
        connection.check_limits(silence_s, keepalive_s)
        self._silence_s = silence_s
        options = connection.channel_options(keepalive_s)
        self._channels = [
            connection.aio_channel(name, tls, options, interceptors) for name in connection.targets(target)
        ]
        admin_tls = connection.administrative(tls, "router")
        self._admins = [connection.aio_channel(name, admin_tls, options) for name in connection.admin_targets(admin)]
        round_robin = connection.is_round_robin(load_balancing)
        self._routers = Routers(len(self._channels), round_robin=round_robin)
        self._budget = RetryBudget(self._retry)
        self._context_metadata = context_metadata
        self._metadata = connection.metadata(api_key, metadata)
        self._admin_routers = Routers(max(1, len(self._admins)))
        self._rng, self._closed = random.Random(), False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Active calls fail."""
        self._closed = True
        for channel in (*self._channels, *self._admins):
            await channel.close()

    async def generate(
        self,
        prompt: types.Prompt,
        options: types.Options | None = None,
        *,
        timeout_s: float | None = None,
        **changes: object,
    ) -> types.Reply:
        """Return the complete answer. `changes` are fields of Options.

        Raises:
            PenstockError: The request failed; the subclass tells how.
        """
        request = self._request(prompt, options, changes, timeout_s)
        async for _ in self._run(request):
            pass
        return request.reply()

    async def stream(
        self,
        prompt: types.Prompt,
        options: types.Options | None = None,
        *,
        timeout_s: float | None = None,
        **changes: object,
    ) -> AsyncIterator[types.Event]:
        """Yield the events as they arrive, Finished last. Leaving the iteration cancels the request."""
        async with aclosing(self._run(self._request(prompt, options, changes, timeout_s))) as events:
            async for event in events:
                yield event

    async def models(self) -> list[types.Model]:
        """The models that requests may name."""
        response = await self._call(
            lambda router: self._router(router).ListModels(
                pb.ListModelsRequest(), timeout=connection.CALL_TIMEOUT_S, metadata=self._metadata
            ),
            self._routers,
        )
        return [generation.model_from_proto(model) for model in response.models]

    async def status(self) -> mesh_status.MeshStatus:
        """The state of the mesh as seen by the router."""
        response = await self._call(
            lambda router: self._mesh(router).GetStatus(pb.GetStatusRequest(), timeout=connection.CALL_TIMEOUT_S),
            self._admin_routers,
        )
        return mesh.status_from_proto(response.status)

    async def watch_status(self, interval_s: float = 1.0) -> AsyncIterator[mesh_status.MeshStatus]:
        """Yield the status at every interval, until the iteration is left.

        Raises:
            PenstockError: The call failed, or nothing arrived for `silence_s` or three intervals, whichever is longer.
        """
        request = pb.WatchStatusRequest(interval=times.duration(interval_s))
        call = self._mesh(self._admin_routers.preferred).WatchStatus(request)
        loop, limit_s = asyncio.get_running_loop(), max(self._silence_s, MISSED_HEARTBEATS * interval_s)
        watch = SilenceWatch(lambda: limit_s)
        watcher, cancelling = LoopWatcher(watch, call), _cancelling()
        try:
            watcher.start()
            watch.waiting(loop.time())
            async for response in call:
                watch.heard()
                yield mesh.status_from_proto(response.status)
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

    async def traces(self, limit: int | None = None, trace_id: str | None = None) -> list[mesh_status.Trace]:
        """The traces of the last requests, newest first, or the one with the id."""
        request = pb.ListTracesRequest(limit_count=limit, trace_id=trace_id)
        response = await self._call(
            lambda router: self._mesh(router).ListTraces(request, timeout=connection.CALL_TIMEOUT_S),
            self._admin_routers,
        )
        return [mesh.trace_from_proto(trace) for trace in response.traces]

    async def usage(self, days: int = 1) -> list[mesh_status.TenantUsage]:
        """What tenants have used on the last `days` days (UTC), today included."""
        request = pb.GetUsageRequest(day_count=days)
        response = await self._call(
            lambda router: self._mesh(router).GetUsage(request, timeout=connection.CALL_TIMEOUT_S),
            self._admin_routers,
        )
        return [mesh.usage_from_proto(entry) for entry in response.entries]

    async def served_requests(self, page_token: str = "") -> tuple[list[mesh_status.ServedRequest], str]:
        """(arrivals and token counts of a page of the mesh's last requests, the token of the next page), newest first.

        page_token: of the page before; empty for the first page. An empty next token: there are no further pages.
        """
        request = pb.ListServedRequestsRequest(page_token=page_token)
        response = await self._call(
            lambda router: self._mesh(router).ListServedRequests(request, timeout=connection.CALL_TIMEOUT_S),
            self._admin_routers,
        )
        return [mesh.served_request_from_proto(each) for each in response.requests], response.next_page_token

    async def sampled_prompts(self, page_token: str = "") -> tuple[list[list[types.Message]], str]:
        """(the messages of each prompt of a page of the mesh's sampled prompts, the token of the next page), newest first.

        page_token: of the page before; empty for the first page. An empty next token: there are no further pages.
        """
        request = pb.ListSampledPromptsRequest(page_token=page_token)
        response = await self._call(
            lambda router: self._mesh(router).ListSampledPrompts(request, timeout=connection.CALL_TIMEOUT_S),
            self._admin_routers,
        )
        return [mesh.sampled_prompt_from_proto(each) for each in response.prompts], response.next_page_token

    async def move(self, request_id: str, instance_id: str) -> mesh_status.Move:
        """Move a reply that this client's router streams to another instance of its tier."""
        request = pb.MoveReplyRequest(request_id=request_id, instance_id=instance_id)
        with errors.raised_from_rpc():
            response = await self._mesh(self._preferred_admin()).MoveReply(request, timeout=connection.MOVE_TIMEOUT_S)
        return mesh.move_from_proto(response)

    def _request(
        self, prompt: types.Prompt, options: types.Options | None, changes: dict[str, object], timeout_s: float | None
    ) -> ResumableRequest:
        deadline_s = asyncio.get_running_loop().time() + (timeout_s if timeout_s is not None else self._timeout_s)
        merged = connection.merged(options, changes)
        request = ResumableRequest(prompt, merged, self._retry, self._routers, self._budget, deadline_s, self._rng)
        request.metadata = connection.call_metadata(
            self._metadata, request.metadata, self._context_metadata, merged.metadata
        )
        return request

    async def _run(self, request: ResumableRequest) -> AsyncGenerator[types.Event, None]:
        loop = asyncio.get_running_loop()
        while not request.finished:
            while (wait_s := request.wait_s(loop.time())) > 0:
                await asyncio.sleep(wait_s)
            if self._closed:
                raise errors.client_closed()
            message, timeout_s = request.message(), max(0.0, request.deadline_s - loop.time())
            call = self._router(request.router).Generate(message, timeout=timeout_s, metadata=request.metadata)
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
                # gRPC also raises this in the reader when the call was cancelled, not the reader's task.
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

    def _router(self, router: int) -> "router_pb2_grpc.RouterServiceAsyncStub":
        return router_pb2_grpc.RouterServiceStub(self._channels[router])

    def _mesh(self, router: int) -> "router_pb2_grpc.MeshServiceAsyncStub":
        if not self._admins:
            raise errors.no_admin_listener()
        return router_pb2_grpc.MeshServiceStub(self._admins[router])

    def _preferred_admin(self) -> int:
        """The administrative listener of the router that new requests try first, if there is one of each router."""
        one_each = len(self._admins) == self._routers.count
        return self._routers.preferred if one_each else self._admin_routers.preferred

    async def _call(self, call: Callable[[int], Awaitable[_Response]], routers: Routers) -> _Response:
        """Call the preferred router, or another where that one is unavailable or does not respond in time."""
        failover = RouterFailover(routers)
        while True:
            try:
                return await call(failover.router)
            except aio.AioRpcError as error:
                failure = errors.from_rpc(error)
                if not failover.advance(failure):
                    raise failure from error


def _cancelling() -> int:
    """Number of pending cancellation requests of the current task."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


class AsyncPlannerClient:
    """A client of the planner: reads, sets, watches and computes plans."""

    def __init__(self, target: str, *, tls: connection.Tls | None = None) -> None:
        self._channel = connection.aio_channel(target, connection.administrative(tls, "planner"), connection.OPTIONS)
        self._stub: planner_pb2_grpc.PlannerServiceAsyncStub = planner_pb2_grpc.PlannerServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def get_plan(self, revision: int | None = None) -> plans.Plan:
        """The plan of a revision, or the current one.

        Raises:
            NotFoundError: There is no such revision.
        """
        with errors.raised_from_rpc():
            response = await self._stub.GetPlan(
                planner_pb2.GetPlanRequest(revision=revision), timeout=connection.CALL_TIMEOUT_S
            )
        return served_plan.plan_from_proto(response.plan)

    async def list_plans(self, limit: int | None = None) -> list[plans.Plan]:
        """The last plans, newest first."""
        request = planner_pb2.ListPlansRequest(limit_count=limit)
        with errors.raised_from_rpc():
            response = await self._stub.ListPlans(request, timeout=connection.CALL_TIMEOUT_S)
        return [served_plan.plan_from_proto(plan) for plan in response.plans]

    async def set_plan(self, plan: plans.Plan, *, expected_revision: int | None = None) -> plans.Plan:
        """Publish a plan; return it with its revision.

        Raises:
            InvalidRequestError: The plan is invalid; `fields` names the problems.
            ConflictError: The current revision is not `expected_revision`.
        """
        request = planner_pb2.SetPlanRequest(plan=served_plan.plan_to_proto(plan), expected_revision=expected_revision)
        with errors.raised_from_rpc():
            response = await self._stub.SetPlan(request, timeout=connection.CALL_TIMEOUT_S)
        return served_plan.plan_from_proto(response.plan)

    async def plan_cascade(
        self,
        inputs: plans.PlanningInputs,
        *,
        min_quality: float | None = None,
        max_latency_s: float | None = None,
        objective: str = "largest-tier",
        confidence: float | None = None,
        gpus: int | None = None,
        budget: str = "at-most",
        goal: str | None = None,
        max_utilisation: float | None = None,
        skip: bool = False,
        burst_floor: float | None = None,
        burst_mean: float | None = None,
        max_tiers: int | None = None,
        min_tiers: int | None = None,
        early_error: float | None = None,
        percentile: float | None = None,
        long_answers: bool = False,
        best_answer: bool = False,
    ) -> AsyncIterator[plans.PlanProgress | plans.CascadePlan | plans.Unreachable]:
        """Compute a plan without publishing it. Yields progress, then a CascadePlan or Unreachable.

        Leaving the iteration stops the computation. objective: which latency is meant, largest-tier, end-to-end, first-token
        or pace, at `percentile`; default: 95. budget: whether `gpus` is a limit (at-most) or the number to use (exact). goal:
        latency, quality, cost or rate; default: cost if both targets are given, else the one without a target.
        max_utilisation: largest allowed utilisation of each tier; None for no limit. skip: also choose below which predicted
        score each tier is passed over; the prompts need `predicted_scores`. burst_floor: also compute a burst ladder, whose
        steps have at least this quality. burst_mean: that its mean holds; default: min_quality. max_tiers: the tiers are
        candidates, of which a cascade has so many at most; min_tiers: at least. early_error: also fit early checks, which may
        reject this share of the answers that would stand; the prompts need `unfinished_scores`. long_answers: also choose
        from which length and score on long answers are accepted. best_answer: also choose whether the best answer of a
        request is delivered instead of the last one.

        Raises:
            InvalidRequestError: The inputs are invalid; `fields` names the problems.
            ValueError: The inputs cannot be sent.
        """
        call = self._stub.PlanCascade(
            planning.plan_request(
                inputs,
                min_quality,
                max_latency_s,
                objective,
                confidence,
                gpus,
                budget,
                goal,
                max_utilisation,
                skip,
                burst_floor,
                burst_mean,
                max_tiers,
                min_tiers,
                early_error,
                percentile,
                long_answers,
                best_answer,
            )
        )
        try:
            async for response in call:
                yield planning.plan_event_from_proto(response)
        except aio.AioRpcError as error:
            raise errors.from_rpc(error) from error
        finally:
            call.cancel()

    async def plan_stages(
        self,
        tier: str,
        *,
        kv_bytes_per_token: float = 0.0,
        bandwidth_bytes_per_s: float = 0.0,
        instances: int | None = None,
        qoe: Sequence[float] = (),
        sequences: Iterable[plans.SequenceInFlight] = (),
        max_tokens: int | None = None,
        trace: Sequence[plans.TraceRow] = (),
        replica: Mapping[str, Any] | None = None,
        against: Sequence[plans.Stage] = (),
        publish: bool = False,
    ) -> plans.StageLayout:
        """Assign the instances of a tier to length stages, with a trace by replay; `publish` publishes what it favours.

        Defaults: instances and qoe (D0 to D4, seconds) of the current plan, the sequences that the instances hold, their
        context length as max_tokens, the KV of their model, and the bandwidth that they measured.

        trace: of requests of the tier, see plans.TraceRow, of which the last 3,000 are replayed on
        instances like `replica`, the fields of the message MeasuredReplica; what they favour also on the 3,000 before.
        against: the layout that a change has to pay against; empty: one stage. publish: as a plan revision; needs a
        trace, and publishes nothing if no change pays.

        Raises:
            InvalidRequestError: The inputs are invalid, or the replay takes more than 10 minutes; `fields` names the
                problems.
            ConflictError: Another plan was published meanwhile.
            ValueError: qoe does not have five coefficients, or replica has a bad field.
        """
        request = served_plan.stages_request(
            tier, instances, qoe, sequences, kv_bytes_per_token, bandwidth_bytes_per_s, max_tokens, publish
        )
        served_plan.add_replay(request, trace, replica, against)
        with errors.raised_from_rpc():
            response = await self._stub.PlanStages(request, timeout=connection.DEFAULT_TIMEOUT_S)
        return served_plan.stage_layout_from_proto(response)

    async def simulate_deployment(
        self,
        inputs: plans.PlanningInputs,
        replicas: Sequence[Sequence[plans.ReplicaGroup]],
        thresholds: Sequence[float | None],
        skip_below: Sequence[float | None] = (),
        early_checks: Sequence[Sequence[plans.EarlyCheck]] = (),
        long_answers: Sequence[plans.LongAnswers | None] = (),
        dispatch: str = "capacity",
        best_answer: bool = False,
    ) -> plans.Simulation:
        """Simulate a deployment in virtual time. thresholds: of each tier but the last; None skips the tier.

        skip_below: of each tier but the last, the predicted score below which prompts pass it over; None or empty: never.
        early_checks: of each tier but the last, at some of the inputs' `early_after_tokens`; empty: none. long_answers: of
        each tier but the last, which are accepted from a lower score on; None or empty: length does not matter. dispatch: how
        requests are distributed over replicas, capacity, round-robin, or pending-work, as routers do. best_answer:
        whether the best answer of a request is delivered instead of the last one.

        Raises:
            InvalidRequestError: The inputs are invalid; `fields` names the problems.
            ValueError: The inputs cannot be sent.
        """
        request = planning.simulate_request(
            inputs, replicas, thresholds, skip_below, early_checks, long_answers, dispatch, best_answer
        )
        with errors.raised_from_rpc():
            response = await self._stub.SimulateDeployment(request, timeout=connection.DEFAULT_TIMEOUT_S)
        return planning.simulation_from_proto(response)

    async def watch_plan(self, after_revision: int | None = None) -> AsyncIterator[plans.Plan]:
        """Yield the current plan, then every later one, until the iteration is left."""
        call = self._stub.WatchPlan(planner_pb2.WatchPlanRequest(after_revision=after_revision))
        try:
            async for response in call:
                yield served_plan.plan_from_proto(response.plan)
        except aio.AioRpcError as error:
            raise errors.from_rpc(error) from error
        finally:
            call.cancel()
