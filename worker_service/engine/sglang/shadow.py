"""SLOs at an SGLang server: a prediction of a scheduler that is not ours. No I/O, no clock.

The server forms its steps itself: prompts in order of arrival, in chunks, next to all decodes. It has one batch and one pool
of KV: a server with copies of the model or groups of attention is refused (`slo_shape_problems`). This worker knows which
requests it has sent, how many tokens each has, and how long steps take. From this *shadow state* it decides

- whom to admit (`decide`): by the compiled admission of `services.domain.slo`, whose steps are not exactly the server's;
- what to send (`plan`): admitted prompts by deadline, only few chunks ahead, so that the server's own order hardly matters;
- which best-effort requests to pause: those that came last, while they are in the way of admitted ones.

What the prediction misses, the correction of step times makes good, and the measured attainment shows.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.services.domain.instances import SloHeadroom
from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.services.domain.slo.compiled.layout import Kv, step_model
from penstock.services.domain.slo.compiled.table import Snapshot, TableRequest, decide
from penstock.services.domain.slo.correction import LatencyCorrection
from penstock.types.slo import SloClass
from penstock.worker_service.engine.sglang.client import ServerInfo
from penstock.worker_service.engine.sglang.moves import Running
from penstock.worker_service.scheduling.headroom import headroom

CHUNKS_AHEAD = 2
"""Prompt tokens sent and not computed yet, in chunks of the server: one that is computed, one that waits after it."""
CORRECTION_WINDOWS = 64
"""Windows of ten tokens whose times are compared with their prediction."""
TYPICAL_DECODES = 16
"""Decodes next to which a chunk must keep the tightest pace; with more of them, admission declines."""


@dataclass(frozen=True, slots=True)
class Turns:
    """What to do now: requests to send to the server, best-effort requests to pause."""

    send: tuple[Running, ...] = ()
    pause: tuple[Running, ...] = ()


def chunk_within(tpot_s: float, latency: StepLatencyModel, server: ServerInfo) -> int:
    """The largest chunk, in full pages, with which a step keeps a pace next to TYPICAL_DECODES decodes: at least one page, at
    most the server's own chunk.
    """
    decodes = StepLoad(min(server.max_running, TYPICAL_DECODES), 0)
    fitting = latency.tokens_within(tpot_s, server.step_tokens, decodes)
    pages = min(server.step_tokens, fitting) // server.page_tokens
    return max(server.page_tokens, pages * server.page_tokens)


class ShadowScheduler:
    """Admission, order and pauses for the requests of one worker."""

    def __init__(self, latency: StepLatencyModel, server: ServerInfo) -> None:
        self._latency, self._server = latency, server
        self.correction = LatencyCorrection(window_steps=CORRECTION_WINDOWS)

    def warm(self) -> None:
        """Compile every compiled function that is called here, or read it from its cache."""
        self._decide(0.0, [], [TableRequest("new", 4, 8, due_s=1e6, tpot_s=1.0)])
        self.headroom([])

    def decide(self, now_s: float, requests: Sequence[Running], new: Sequence[Running]) -> list[bool]:
        """Whether each of `new` is admitted. requests: all others."""
        promised = [r for r in requests if _promised(r)]
        begins_s = now_s + self.step_s(r for r in requests if r.sent)  # after the running step
        candidates = [_as_table_request(r) for r in new]
        return self._decide(begins_s, [_as_table_request(r) for r in promised], candidates)

    def _decide(self, now_s: float, running: list[TableRequest], new: list[TableRequest]) -> list[bool]:
        server, correction = self._server, self.correction.factor
        model = step_model(self._latency, server.step_tokens, correction=correction, places=server.max_running)
        kv = Kv(float(server.kv_tokens), server.page_tokens - 1)
        return list(decide(now_s, Snapshot.of(running), new, model, kv).admitted)

    def plan(self, requests: Sequence[Running]) -> Turns:
        """What to send and to pause now.

        Without admitted requests everything is sent at once, and waits in the server's queue. Otherwise admitted ones go
        first, by deadline, and best effort is sent only where it neither takes their KV nor makes a step too long for them.
        """
        if not any(_promised(r) for r in requests):
            return Turns(tuple(r for r in requests if r.waits))
        sent, pause, send = [r for r in requests if r.sent], list[Running](), list[Running]()

        def make_room(suffices: Callable[[], bool]) -> None:
            while not suffices() and (victim := _victim(sent)) is not None:
                sent.remove(victim)
                pause.append(victim)

        waiting = sorted((r for r in requests if _promised(r) and r.waits), key=_deadline)
        for request in waiting:
            make_room(partial(self._may_send, request, sent))
            if not self._may_send(request, sent):
                break
            sent.append(request)
            send.append(request)
        make_room(partial(self._fits_pace, sent))
        if len(send) == len(waiting) and not pause:
            for request in (r for r in requests if not _promised(r) and r.waits):
                if not self._may_send(request, sent) or not self._fits_pace([*sent, request]):
                    break
                sent.append(request)
                send.append(request)
        return Turns(tuple(send), tuple(pause))

    def _may_send(self, request: Running, sent: Sequence[Running]) -> bool:
        """Whether there is a place and KV for a request, and few prompt tokens are before it."""
        ahead = sum(len(r.tokens) for r in sent if not r.answered)
        if ahead and ahead + len(request.tokens) > CHUNKS_AHEAD * self._server.step_tokens:
            return False
        held = sum(_whole_tokens(r) if _promised(r) else len(r.tokens) + 1 for r in sent)
        needs = _whole_tokens(request) if _promised(request) else len(request.tokens) + 1
        return len(sent) < self._server.max_running and held + needs <= self._server.kv_tokens

    def _fits_pace(self, sent: Sequence[Running]) -> bool:
        """Whether a step with all these requests keeps the tightest pace that was promised to one of them."""
        paces = [r.slo.tpot_s for r in sent if r.slo is not None and _promised(r)]
        return self.step_s(sent) <= min(paces, default=math.inf)

    def step_s(self, requests: Iterable[Running]) -> float:
        """The predicted seconds of a step with these requests on the server, at the p95."""
        return self.uncorrected_step_s(requests) * self.correction.factor

    def uncorrected_step_s(self, requests: Iterable[Running]) -> float:
        """The same by the latency model: all decodes, and a chunk of the prompts that have no token yet."""
        contexts, pending = list[int](), 0
        for request in requests:
            if request.answered:
                contexts.append(len(request.tokens))
            else:
                pending += len(request.tokens)
        chunk = min(pending, self._server.step_tokens)
        load = StepLoad(len(contexts) + chunk, sum(contexts) + chunk, 0.5 * chunk * (chunk + 1))
        return self._latency.step_s(load)

    def headroom(self, requests: Sequence[Running]) -> SloHeadroom:
        """What could still be promised."""
        promised = [r for r in requests if _promised(r)]
        decodes = [(r.slo.tpot_s, len(r.tokens)) for r in promised if r.answered and r.slo is not None]
        pending = sum(len(r.tokens) for r in promised if not r.answered)
        free = self._server.kv_tokens - sum(map(_whole_tokens, promised))
        model = step_model(self._latency, self._server.step_tokens, correction=self.correction.factor)
        return headroom(decodes, pending, free, model)


def _promised(request: Running) -> bool:
    return request.slo is not None and request.slo.granted is SloClass.STANDARD


def _deadline(request: Running) -> float:
    assert request.slo is not None
    return request.slo.due_s


def _victim(sent: Sequence[Running]) -> Running | None:
    """The best-effort request that came last, of those on the server that are not about to move."""
    able = [r for r in sent if not _promised(r) and r.stopped is None and not r.aborted and r.sent]
    return able[-1] if able else None


def _whole_tokens(request: Running) -> int:
    """Tokens of a request when it has its predicted reply."""
    left = request.slo.left_tokens(request.output_tokens) if request.slo is not None else 0
    return len(request.tokens) + left


def _as_table_request(request: Running) -> TableRequest:
    slo, length = request.slo, len(request.tokens)
    assert slo is not None
    return TableRequest(
        request.server_id,
        pending_tokens=1 if request.answered else length,
        output_tokens=slo.left_tokens(request.output_tokens),
        due_s=slo.due_s,
        tpot_s=slo.tpot_s,
        context_tokens=length - 1 if request.answered else 0,
        decoding=request.answered,
        placed=request.sent,
        again_tokens=slo.again_tokens,
    )
