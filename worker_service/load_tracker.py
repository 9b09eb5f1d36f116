"""The load of this worker, as published to Redis, by RPC and as metrics."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from services.domain.instances import Load
from worker_service.engine.interface import Engine, Speculating, StepPredicting

_Read = Callable[[Load], float]


class LoadTracker:
    """Reads the engine's load and exports it as gauges."""

    def __init__(self, engine: Engine, meter: Meter, tier: str) -> None:
        self._engine, self._labels = engine, {"penstock.tier": tier}
        for name, unit, read, description in (
            ("penstock.worker.running", "{request}", lambda load: len(load.running_tokens), "Requests that hold KV."),
            ("penstock.worker.queued", "{request}", lambda load: len(load.queued_tokens), "Requests waiting for KV."),
            (
                "penstock.worker.kv_blocks.free",
                "{block}",
                lambda load: load.free_kv_blocks,
                "KV blocks that are not held.",
            ),
            (
                "penstock.worker.kv_tokens.cached",
                "{token}",
                lambda load: load.cached_tokens,
                "Tokens of finished requests whose KV can be reused.",
            ),
            (
                "penstock.worker.output_rate",
                "{token}/s",
                lambda load: load.output_tokens_per_s,
                "Output tokens per second.",
            ),
        ):
            self._gauge(meter, name, unit, description, read)
        if engine.steps is not None:
            meter.create_observable_counter(
                "penstock.worker.steps",
                callbacks=[lambda _: [Observation(engine.steps or 0, self._labels)]],
                unit="{step}",
            )
        if isinstance(engine, StepPredicting) and engine.latency_correction is not None:
            meter.create_observable_gauge(
                "penstock.worker.step_correction",
                callbacks=[lambda _: [Observation(engine.latency_correction or 1.0, self._labels)]],
                description="The p95 of actual over predicted step times, by which predictions are multiplied.",
            )
        meter.create_observable_counter(
            "penstock.worker.preemptions",
            callbacks=[lambda _: [Observation(engine.preemptions, self._labels)]],
            unit="{preemption}",
        )

        if isinstance(engine, Speculating):
            self._count_drafts(engine, meter)
        self.kv_bytes_per_s: Callable[[], float] = lambda: 0.0
        """At which rate KV moves from here; 0 while unknown."""
        self._gauge(
            meter,
            "penstock.worker.kv_bandwidth",
            "By/s",
            "Rate at which KV moves to another worker; 0 while unknown.",
            lambda load: load.kv_bytes_per_s,
        )

    def _count_drafts(self, engine: Speculating, meter: Meter) -> None:
        """Metrics of speculative decoding."""

        def tokens(_: CallbackOptions) -> Iterable[Observation]:
            state = engine.speculation()
            for source, verified in state.verified.items():
                accepted, labels = state.accepted[source], self._labels | {"penstock.draft.source": source}
                yield Observation(accepted, labels | {"penstock.draft.outcome": "accepted"})
                yield Observation(verified - accepted, labels | {"penstock.draft.outcome": "rejected"})

        def failures(_: CallbackOptions) -> Iterable[Observation]:
            for source, count in engine.speculation().failures.items():
                yield Observation(count, self._labels | {"penstock.draft.source": source})

        def window(_: CallbackOptions) -> Iterable[Observation]:
            state = engine.speculation()
            yield Observation(state.window, self._labels | {"penstock.draft.chain": " > ".join(state.chain) or "none"})

        def share(_: CallbackOptions) -> Iterable[Observation]:
            state = engine.speculation()
            if state.accepted_share is not None:
                yield Observation(state.accepted_share, self._labels)

        for name, callback, unit, description in (
            ("penstock.worker.draft_tokens", tokens, "{token}", "Drafted tokens that were verified."),
            (
                "penstock.worker.draft_failures",
                failures,
                "{failure}",
                "Models and sources of drafts that failed and are not used any more.",
            ),
        ):
            meter.create_observable_counter(name, callbacks=[callback], unit=unit, description=description)
        meter.create_observable_gauge(
            "penstock.worker.draft_window",
            callbacks=[window],
            unit="{token}",
            description="Tokens that the chain which drafts now drafts for a reply in a step; 0 while none does.",
        )
        meter.create_observable_gauge(
            "penstock.worker.draft_acceptance",
            callbacks=[share],
            description="Share of the last tokens of drafting models that the tier's model accepted.",
        )

    def load(self) -> Load:
        return replace(self._engine.load(), kv_bytes_per_s=self.kv_bytes_per_s())

    def _gauge(self, meter: Meter, name: str, unit: str, description: str, read: _Read) -> None:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(read(self.load()), self._labels)]

        meter.create_observable_gauge(name, callbacks=[observe], unit=unit, description=description)
