"""The load of this worker, as published to Redis, by RPC and as metrics."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from opentelemetry.metrics import Meter, Observation

from penstock.services.domain.instances import Load
from penstock.types.mesh_status import Drafting
from penstock.worker_service.engine.interface import Engine, Speculating, StepPredicting

_Observe = Callable[[], Iterable[Observation]]

OF_LOAD: tuple[tuple[str, str, str, Callable[[Load], float]], ...] = (
    ("penstock.worker.running", "{request}", "Requests that hold KV.", lambda load: len(load.running_tokens)),
    ("penstock.worker.queued", "{request}", "Requests waiting for KV.", lambda load: len(load.queued_tokens)),
    ("penstock.worker.kv_blocks.free", "{block}", "KV blocks that are not held.", lambda load: load.free_kv_blocks),
    (
        "penstock.worker.kv_tokens.cached",
        "{token}",
        "Tokens of finished requests whose KV can be reused.",
        lambda load: load.cached_tokens,
    ),
    ("penstock.worker.output_rate", "{token}/s", "Output tokens per second.", lambda load: load.output_tokens_per_s),
    (
        "penstock.worker.kv_bandwidth",
        "By/s",
        "Rate at which KV moves to another worker; 0 while unknown.",
        lambda load: load.kv_bytes_per_s,
    ),
)
"""Gauges of the load: name, unit, description, value."""


class LoadTracker:
    """Reads the engine's load and exports it as metrics."""

    def __init__(self, engine: Engine, meter: Meter, tier: str) -> None:
        self._engine, self._labels, self._meter = engine, {"penstock.tier": tier}, meter
        self.kv_bytes_per_s: Callable[[], float] = lambda: 0.0
        """At which rate KV moves from here; 0 while unknown."""
        for name, unit, description, read in OF_LOAD:
            self._gauge(name, unit, description, partial(self._of_load, read))
        if engine.steps is not None:
            self._counter("penstock.worker.steps", "{step}", "", lambda: [self._observed(engine.steps or 0)])
        if isinstance(engine, StepPredicting) and engine.latency_correction is not None:
            about = "The p95 of actual over predicted step times, by which predictions are multiplied."
            self._gauge(
                "penstock.worker.step_correction", "", about, lambda: [self._observed(engine.latency_correction or 1.0)]
            )
        self._counter("penstock.worker.preemptions", "{preemption}", "", lambda: [self._observed(engine.preemptions)])
        if isinstance(engine, Speculating):
            self._count_drafts(engine)

    def _count_drafts(self, engine: Speculating) -> None:
        """Metrics of speculative decoding."""

        def tokens() -> Iterable[Observation]:
            for source, counts in engine.speculation().counts.items():
                labels, rejected = {"penstock.draft.source": source}, counts.verified - counts.accepted
                yield self._observed(counts.accepted, labels | {"penstock.draft.outcome": "accepted"})
                yield self._observed(rejected, labels | {"penstock.draft.outcome": "rejected"})

        def failures() -> Iterable[Observation]:
            for source, counts in engine.speculation().counts.items():
                yield self._observed(counts.failures, {"penstock.draft.source": source})

        def window() -> Iterable[Observation]:
            drafting = engine.speculation().drafting or Drafting((), 0, None)
            yield self._observed(drafting.window, {"penstock.draft.chain": " > ".join(drafting.chain) or "none"})

        def share() -> Iterable[Observation]:
            drafting = engine.speculation().drafting
            if drafting is not None and drafting.accepted_share is not None:
                yield self._observed(drafting.accepted_share)

        self._counter("penstock.worker.draft_tokens", "{token}", "Drafted tokens that were verified.", tokens)
        about = "Models and sources of drafts that failed and are not used any more."
        self._counter("penstock.worker.draft_failures", "{failure}", about, failures)
        about = "Tokens that the chain which drafts now drafts for a reply in a step; 0 while none does."
        self._gauge("penstock.worker.draft_window", "{token}", about, window)
        about = "Share of the last tokens of drafting models that the tier's model accepted."
        self._gauge("penstock.worker.draft_acceptance", "", about, share)

    def load(self) -> Load:
        return replace(self._engine.load(), kv_bytes_per_s=self.kv_bytes_per_s())

    def _of_load(self, read: Callable[[Load], float]) -> Iterable[Observation]:
        yield self._observed(read(self.load()))

    def _gauge(self, name: str, unit: str, description: str, observe: _Observe) -> None:
        self._meter.create_observable_gauge(name, [lambda _: observe()], unit=unit, description=description)

    def _counter(self, name: str, unit: str, description: str, observe: _Observe) -> None:
        self._meter.create_observable_counter(name, [lambda _: observe()], unit=unit, description=description)

    def _observed(self, value: float, labels: dict[str, str] | None = None) -> Observation:
        return Observation(value, self._labels | (labels or {}))
