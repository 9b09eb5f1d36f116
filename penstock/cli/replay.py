"""A measuring client: sends questions to a mesh at given times, and keeps what it saw of every request."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.cli.held_out import Question
from penstock.client import errors
from penstock.client.aio import AsyncClient
from penstock.client.types import Options, Reply, Tokens
from penstock.types.events import Finished


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one question; seconds since its arrival.

    latency_s: until the end of the answer. first_s: until the first token that the client could show. reply: without token
    ids and logprobs; None if the request failed, for `error`.
    """

    question: Question
    latency_s: float
    reply: Reply | None = None
    error: str = ""
    first_s: float | None = None

    @property
    def correct(self) -> bool:
        return self.reply is not None and self.question.answered_by(self.reply.text)


@dataclass(frozen=True, slots=True)
class Run:
    """seconds: from the first arrival to the last answer. cpu_s: that the processes of the mesh used meanwhile."""

    outcomes: Sequence[Outcome]
    seconds: float
    cpu_s: float

    @property
    def answered(self) -> list[tuple[Outcome, Reply]]:
        """The requests that have an answer, with it."""
        return [(outcome, outcome.reply) for outcome in self.outcomes if outcome.reply is not None]


def arrivals_s(count: int, rate: float, seed: int) -> list[float]:
    """Times of a Poisson process of `rate` requests per second, the first at 0 s."""
    draw, at_s, times = random.Random(seed), 0.0, list[float]()
    for _ in range(count):
        times.append(at_s)
        at_s += draw.expovariate(rate)
    return times


async def replay(
    client: AsyncClient,
    questions: Sequence[Question],
    models: Sequence[str],
    times_s: Sequence[float],
    cpu_s: Callable[[], float],
    *,
    timeout_s: float,
    max_tokens: int | None = None,
    cache_salt: str = "",
    on_reply: Callable[[], object] = lambda: None,
) -> Run:
    """Send each question to its model at its time, greedily.

    cpu_s: CPU seconds that the mesh has used so far. max_tokens: of a reply; None for the mesh's own limit. cache_salt: of
    all requests, so that what others have computed does not help.
    """
    loop, generation = (
        asyncio.get_running_loop(),
        Options(temperature=0.0, max_tokens=max_tokens, cache_salt=cache_salt),
    )
    cpu_before_s, began_s = cpu_s(), loop.time()

    async def one(question: Question, model: str, arrival_s: float) -> Outcome:
        at_s = began_s + arrival_s
        await asyncio.sleep(max(0.0, at_s - loop.time()))
        text, first_s, end = "", None, None
        try:
            async for event in client.stream(question.prompt, generation, model=model, timeout_s=timeout_s):
                match event:
                    case Tokens():
                        text += event.text
                        if first_s is None and event.token_ids:
                            first_s = loop.time() - at_s
                    case Finished():
                        end = event
        except errors.PenstockError as error:
            message = f"{type(error).__name__}: {error}"
            return Outcome(question, loop.time() - at_s, error=message, first_s=first_s)
        finally:
            on_reply()
        assert end is not None  # a stream without it raises
        about = (end.reason, end.tier, end.usage, end.tiers, end.ttft_s, end.total_s, "", end.trace_id)
        return Outcome(question, loop.time() - at_s, Reply(text, (), (), *about), first_s=first_s)

    outcomes = await asyncio.gather(*map(one, questions, models, times_s))
    return Run(outcomes, loop.time() - began_s, cpu_s() - cpu_before_s)
