"""Holds an engine of our own back between two steps, so that a test decides what happens before the next one."""

from collections.abc import Callable

from penstock.worker_service.engine.loop import LoopEngine
from penstock.worker_service.scheduling.batching import BatchScheduler
from penstock.worker_service.scheduling.steps import StepInProgress


def held(engine: LoopEngine, when: Callable[[BatchScheduler], bool]) -> Callable[[], None]:
    """Give no tokens in steps before which `when` is true; call the result to let the engine run freely again."""
    policy = engine._core.scheduler.policy
    plan = policy.plan

    def gated(step: StepInProgress, now_s: float) -> None:
        if not when(step.scheduler):
            plan(step, now_s)

    def release() -> None:
        policy.plan = plan  # type: ignore[method-assign]

    policy.plan = gated  # type: ignore[method-assign]
    return release
