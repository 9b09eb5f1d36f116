"""What `penstock demo` measures in addition to its runs: what a tier sustains, and what the death of a worker costs."""

import asyncio
import os
import signal
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from penstock.cli.held_out import Question
from penstock.client import errors
from penstock.client.aio import AsyncClient
from penstock.client.aio_planner import AsyncPlannerClient
from penstock.client.types import Options
from penstock.types.events import Escalated, Finished, InstanceChanged, TierStarted
from penstock.types.plans import TierPlan

TIMEOUT_S = 600.0  # of one request: real models on CPUs take minutes for several at once
WARM_PROMPTS = 8
LONE_PROMPTS = 5  # sent one after the other, to see how long a request takes without others
BURST_PROMPTS = 32  # sent to see what a tier sustains
FAILOVER_PROMPTS = 24
PLAN_TIMEOUT_S = 30.0  # until a router follows a new plan
PLAN_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Failover:
    """What a worker's death cost. worker: its process. elsewhere: requests that another instance or tier continued with.

    longest_s: the longest time that a request took.
    """

    worker: str
    requests: int
    answered: int
    elsewhere: int
    longest_s: float


@dataclass(frozen=True, slots=True)
class Pace:
    """What the largest tier does alone. lone_s: mean time of a request without others. sustained_per_s: of a burst."""

    lone_s: float
    sustained_per_s: float


async def warm_up(
    client: AsyncClient, model: str, questions: Sequence[Question], max_tokens: int | None = None
) -> None:
    """Send WARM_PROMPTS at once: the first requests of a process take longer, the judge's included."""
    generation = Options(model=model, temperature=0.0, max_tokens=max_tokens)
    await asyncio.gather(
        *(client.generate(question.prompt, generation, timeout_s=TIMEOUT_S) for question in questions[:WARM_PROMPTS])
    )


async def pace_of(
    client: AsyncClient,
    model: str,
    questions: Sequence[Question],
    concurrency: int,
    lone: int = LONE_PROMPTS,
    max_tokens: int | None = None,
) -> Pace:
    """Measure a tier: `lone` prompts one after the other, then the others with `concurrency` in flight."""
    slots, loop = asyncio.Semaphore(concurrency), asyncio.get_running_loop()
    generation = Options(model=model, temperature=0.0, max_tokens=max_tokens)

    async def one(question: Question) -> float:
        async with slots:
            began_s = loop.time()
            await client.generate(question.prompt, generation, timeout_s=TIMEOUT_S)
            return loop.time() - began_s

    lone_s = statistics.fmean([await one(question) for question in questions[:lone]])
    began_s, burst = loop.time(), questions[lone:] or questions
    await asyncio.gather(*map(one, burst))
    return Pace(lone_s, len(burst) / (loop.time() - began_s))


@asynccontextmanager
async def changed_plan(
    client: AsyncClient, planner: AsyncPlannerClient, note: str, change: Callable[[TierPlan], TierPlan]
) -> AsyncIterator[None]:
    """As long as the context lasts the mesh has a plan whose tiers are changed, and its routers follow it.

    Raises:
        TimeoutError: The router does not follow the plan within PLAN_TIMEOUT_S.
    """
    plan = await planner.get_plan()
    tiers = tuple(map(change, plan.tiers))
    changed = await planner.set_plan(replace(plan, tiers=tiers, note=note), expected_revision=plan.revision)
    await _followed(client, changed.revision)
    try:
        yield
    finally:
        restored = await planner.set_plan(replace(plan, note="as before"), expected_revision=changed.revision)
        await _followed(client, restored.revision)


async def _followed(client: AsyncClient, revision: int) -> None:
    async with asyncio.timeout(PLAN_TIMEOUT_S):
        async for status in client.watch_status(PLAN_LOOK_S):
            if status.plan_revision >= revision:
                return


async def fail_over(
    client: AsyncClient, questions: Sequence[Question], process_of: Callable[[str], tuple[str, int] | None]
) -> Failover:
    """Send all questions to the cascade at once, and kill the worker that the first of them has reached.

    process_of: the name and id of an instance's process; None if it has ended.
    """
    loop, killed = asyncio.get_running_loop(), list[str]()
    began_s = loop.time()

    async def one(question: Question) -> tuple[bool, bool, float]:
        """(answered, elsewhere, seconds)."""
        answered = elsewhere = False
        try:
            async for event in client.stream(question.prompt, temperature=0.0, timeout_s=TIMEOUT_S):
                match event:
                    case TierStarted() if not killed and (process := process_of(event.instance_id)) is not None:
                        killed.append(process[0])
                        os.kill(process[1], signal.SIGKILL)
                    case InstanceChanged() | Escalated(reason="tier_unavailable"):
                        elsewhere = True
                    case Finished():
                        answered = True
        except errors.PenstockError:
            pass  # counted as not answered
        return answered, elsewhere, loop.time() - began_s

    results = await asyncio.gather(*map(one, questions))
    answered, elsewhere = (sum(column) for column in list(zip(*results, strict=True))[:2])
    return Failover(
        killed[0] if killed else "", len(questions), answered, elsewhere, max(seconds for *_, seconds in results)
    )
