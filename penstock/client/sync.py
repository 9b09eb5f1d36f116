"""The blocking client of routers, for programs without an event loop. Thread-safe.

Generated from the asyncio client by `scripts/generate_sync.py`.
"""

import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Self, TypeVar

import grpc

from penstock.client import connection, errors, types
from penstock.client.resumable import MISSED_HEARTBEATS, ResumableRequest, Routers
from penstock.client.retries import RetryBudget, RetryPolicy
from penstock.client.silence import read_in_thread
from penstock.mapper import duration, from_message
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc
from penstock.types import mesh_status

_Response = TypeVar("_Response")


class Client:
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

    Example:
        >>> with Client("127.0.0.1:50051") as client:
        ...     reply = client.generate("What is 12 + 30?", temperature=0)
        ...     print(reply.tier)
        small
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
        interceptors: Sequence[Any] = (),
        context_metadata: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        self._timeout_s, self._retry = timeout_s, retry or RetryPolicy()
        connection.check(silence_s, keepalive_s, load_balancing)
        self._silence_s = silence_s
        options = connection.channel_options(keepalive_s, max(silence_s, connection.DEFAULT_SILENCE_S))
        self._channels = [connection.channel(name, tls, options, interceptors) for name in connection.targets(target)]
        admin_tls = connection.administrative(tls, "router")
        admins = connection.targets(admin) if admin else ()
        self._admins = [connection.channel(name, admin_tls, options) for name in admins]
        self._routers = Routers(len(self._channels), round_robin=load_balancing == "round_robin")
        self._budget = RetryBudget(self._retry)
        self._context_metadata = context_metadata
        self._metadata = connection.metadata(api_key, metadata)
        self._admin_routers = Routers(max(1, len(self._admins)))
        self._rng, self._closed = random.Random(), False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Active calls fail.

        Example:
            >>> client = Client("127.0.0.1:50051")
            >>> client.close()
        """
        self._closed = True
        for channel in (*self._channels, *self._admins):
            channel.close()

    def generate(
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

        Example:
            >>> reply = client.generate("What is 12 + 30?", model="large", max_tokens=8)
            >>> reply.tier, reply.usage.output_tokens
            ('large', 8)
        """
        request = self._request(prompt, options, changes, timeout_s)
        for _ in self._run(request):
            pass
        return request.reply()

    def stream(
        self,
        prompt: types.Prompt,
        options: types.Options | None = None,
        *,
        timeout_s: float | None = None,
        **changes: object,
    ) -> Iterator[types.Event]:
        """Yield the events as they arrive, Finished last. Leaving the iteration cancels the request.

        Example:
            >>> text = ""
            >>> for event in client.stream("What is 12 + 30?"):
            ...     if isinstance(event, Tokens):
            ...         text += event.text
            >>> event.tier, len(text) > 0
            ('small', True)
        """
        with closing(self._run(self._request(prompt, options, changes, timeout_s))) as events:
            for event in events:
                yield event

    def models(self) -> list[types.Model]:
        """The models that requests may name.

        Example:
            >>> [model.id for model in client.models()]
            ['cascade', 'small', 'large']
        """
        request, timeout_s = pb.ListModelsRequest(), connection.CALL_TIMEOUT_S
        response = self._call(
            lambda router: self._router(router).ListModels(request, timeout=timeout_s, metadata=self._metadata),
            self._routers,
        )
        return [from_message(model, types.Model) for model in response.models]

    def status(self) -> mesh_status.MeshStatus:
        """The state of the mesh as seen by the router.

        Example:
            >>> status = client.status()
            >>> {tier.name: tier.live_instances for tier in status.tiers}
            {'small': 1, 'large': 2}
        """
        response = self._call_mesh(lambda stub: stub.GetStatus, pb.GetStatusRequest())
        return from_message(response.status, mesh_status.MeshStatus)

    def watch_status(self, interval_s: float = 1.0) -> Iterator[mesh_status.MeshStatus]:
        """Yield the status at every interval, until the iteration is left.

        Raises:
            PenstockError: The call failed, or nothing arrived for `silence_s` or three intervals, whichever is longer.

        Example:
            >>> for status in client.watch_status(interval_s=0.2):
            ...     if all(tier.live_instances for tier in status.tiers):
            ...         break
        """
        request = pb.WatchStatusRequest(interval=duration(interval_s))
        call = self._mesh(self._admin_routers.preferred).WatchStatus(request)
        limit_s = max(self._silence_s, MISSED_HEARTBEATS * interval_s)
        with closing(read_in_thread(call, lambda: limit_s, self._is_closed)) as responses:
            for response in responses:
                yield from_message(response.status, mesh_status.MeshStatus)

    def traces(self, limit: int | None = None, trace_id: str | None = None) -> list[mesh_status.Trace]:
        """The traces of the last requests, newest first, or the one with the id.

        Example:
            >>> for trace in client.traces(limit=10):
            ...     slowest = max(trace.spans, key=lambda span: span.duration_s)
        """
        request = pb.ListTracesRequest(limit_count=limit, trace_id=trace_id)
        response = self._call_mesh(lambda stub: stub.ListTraces, request)
        return [from_message(trace, mesh_status.Trace) for trace in response.traces]

    def usage(self, days: int = 1) -> list[mesh_status.TenantUsage]:
        """What tenants have used on the last `days` days (UTC), today included.

        Example:
            >>> sum(entry.output_tokens for entry in client.usage(days=7) if entry.tenant == "research")
            0
        """
        request = pb.GetUsageRequest(day_count=days)
        response = self._call_mesh(lambda stub: stub.GetUsage, request)
        return [from_message(entry, mesh_status.TenantUsage) for entry in response.entries]

    def served_requests(self, page_token: str = "") -> tuple[list[mesh_status.ServedRequest], str]:
        """(arrivals and token counts of a page of the mesh's last requests, the token of the next page), newest first.

        page_token: of the page before; empty for the first page. An empty next token: there are no further pages.

        Example:
            >>> requests, next_page = client.served_requests()
            >>> while next_page:
            ...     page, next_page = client.served_requests(next_page)
            ...     requests += page
        """
        request = pb.ListServedRequestsRequest(page_token=page_token)
        response = self._call_mesh(lambda stub: stub.ListServedRequests, request)
        return [from_message(each, mesh_status.ServedRequest) for each in response.requests], response.next_page_token

    def sampled_prompts(self, page_token: str = "") -> tuple[list[list[types.Message]], str]:
        """(the messages of each prompt of a page of the mesh's sampled prompts, the token of the next page), newest first.

        page_token: of the page before; empty for the first page. An empty next token: there are no further pages.

        Example:
            >>> prompts, next_page = client.sampled_prompts()
            >>> texts = [messages[-1]["content"] for messages in prompts]
        """
        request = pb.ListSampledPromptsRequest(page_token=page_token)
        response = self._call_mesh(lambda stub: stub.ListSampledPrompts, request)
        prompts: list[list[types.Message]]
        prompts = [[{"role": m.role, "content": m.content} for m in prompt.messages] for prompt in response.prompts]
        return prompts, response.next_page_token

    def move(self, request_id: str, instance_id: str) -> types.Move:
        """Move a reply that this client's router streams to another instance of its tier.

        Example:
            >>> instances = {i.instance_id for i in (client.status()).instances if i.tier == "large"}
            >>> for event in client.stream("Go.", model="large", request_id="story", max_tokens=900, ignore_eos=True):
            ...     if isinstance(event, TierStarted):
            ...         [other] = instances - {event.instance_id}
            ...     elif isinstance(event, Tokens) and event.offset == 0:
            ...         move = client.move("story", other)
            >>> move.refusal is None, move.offset > 0
            (True, True)
        """
        request = pb.MoveReplyRequest(request_id=request_id, instance_id=instance_id)
        with errors.raised_from_rpc():
            response = self._mesh(self._preferred_admin()).MoveReply(request, timeout=connection.MOVE_TIMEOUT_S)
        if response.HasField("refusal"):
            return types.Move(response.refusal)
        moved = from_message(response.moved, mesh_status.ReplyMoved)
        return types.Move(None, moved.offset, moved.stall_s, moved.sent_bytes)

    def _request(
        self, prompt: types.Prompt, options: types.Options | None, changes: dict[str, object], timeout_s: float | None
    ) -> ResumableRequest:
        deadline_s = time.monotonic() + (timeout_s if timeout_s is not None else self._timeout_s)
        merged = connection.merged(options, changes)
        request = ResumableRequest(prompt, merged, self._retry, self._routers, self._budget, deadline_s, self._rng)
        request.metadata = connection.call_metadata(
            self._metadata, request.metadata, self._context_metadata, merged.metadata
        )
        return request

    def _run(self, request: ResumableRequest) -> Generator[types.Event, None, None]:
        while not request.finished:
            while (wait_s := request.wait_s(time.monotonic())) > 0:
                time.sleep(wait_s)
            if self._closed:
                raise errors.client_closed()
            message, timeout_s = request.message(), max(0.0, request.deadline_s - time.monotonic())
            call = self._router(request.router).Generate(message, timeout=timeout_s, metadata=request.metadata)
            limit_s = partial(request.silence_s, self._silence_s)
            try:
                with closing(read_in_thread(call, limit_s, self._is_closed)) as responses:
                    for response in responses:
                        event = request.take(response)
                        if event is not None:
                            yield event
                request.ended()
            except errors.PenstockError as error:
                if self._closed:
                    raise
                request.failed(error, time.monotonic())

    def _is_closed(self) -> bool:
        return self._closed

    def _router(self, router: int) -> "router_pb2_grpc.RouterServiceStub":
        return router_pb2_grpc.RouterServiceStub(self._channels[router])

    def _mesh(self, router: int) -> "router_pb2_grpc.MeshServiceStub":
        if not self._admins:
            raise errors.no_admin_listener()
        return router_pb2_grpc.MeshServiceStub(self._admins[router])

    def _preferred_admin(self) -> int:
        """The administrative listener of the router that new requests try first, if there is one of each router."""
        one_each = len(self._admins) == self._routers.count
        return self._routers.preferred if one_each else self._admin_routers.preferred

    def _call_mesh(
        self,
        method: Callable[["router_pb2_grpc.MeshServiceStub"], Callable[..., _Response]],
        request: object,
    ) -> _Response:
        return self._call(
            lambda router: method(self._mesh(router))(request, timeout=connection.CALL_TIMEOUT_S), self._admin_routers
        )

    def _call(self, call: Callable[[int], _Response], routers: Routers) -> _Response:
        """Call the preferred router, or another where that one is unavailable or does not respond in time."""
        *others, last = routers.in_order()
        for router in others:
            try:
                return call(router)
            except grpc.RpcError as error:
                failure = errors.from_rpc(error)
                if not isinstance(failure, errors.UnavailableError | errors.DeadlineError):
                    raise failure from error
                routers.failed(router)
        with errors.raised_from_rpc():
            return call(last)
