"""Self-consistency: draws further answers to the same prompt and counts those that agree (Wang et al. 2023)."""

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from judge_service.scorers.exact import Compare, same
from judge_service.scorers.interface import JudgedAnswer, RawScore, ScorerKind
from services.background import end
from services.domain.requests import Prompt, SamplingParams


class Sampler(Protocol):
    """Tiers that can be asked for further answers."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def sample(self, tier: str, prompt: Prompt, sampling: SamplingParams) -> str:
        """The text of one answer. tier: empty for the sampler's own.

        Raises:
            Overloaded: The tier has no capacity.
            DeadlineExceeded: It did not answer in time.
            Unavailable: It cannot be reached.
        """
        ...


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """tier: that is asked; empty: the one that gave the answer. count: samples per answer. max_tokens: of each.

    temperature: above 0, or all samples would be equal. seed: of the first sample; the next ones follow.
    """

    tier: str
    count: int
    temperature: float
    max_tokens: int
    compare: Compare
    seed: int = 1


class ConsistencyScorer:
    """raw: the share of samples that agree with the answer, 0 to 1. Score without calibration: the same in percent.

    The samples' seeds are fixed, so an answer gets the same score again.
    """

    kind = ScorerKind.CONSISTENCY
    needs_logprobs = False
    needs_reference = False
    scores_unfinished = False

    def __init__(self, sampler: Sampler, options: SampleOptions, *, concurrency: int) -> None:
        self._sampler, self._options, self._slots = sampler, options, asyncio.Semaphore(concurrency)

    async def start(self) -> None:
        await self._sampler.start()

    async def close(self) -> None:
        await self._sampler.close()

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        count = self._options.count
        tasks = [asyncio.create_task(self._sample(item, i)) for item in answers for i in range(count)]
        try:
            samples = await asyncio.gather(*tasks)
        finally:  # after a failure or a cancellation, end the other requests
            await end(*tasks)
        scores = []
        for i, item in enumerate(answers):
            agreeing = sum(
                same(self._options.compare, sample, item.answer) for sample in samples[i * count : (i + 1) * count]
            )
            scores.append(RawScore(agreeing / count, 100.0 * agreeing / count))
        return scores

    async def _sample(self, item: JudgedAnswer, number: int) -> str:
        options = self._options
        sampling = SamplingParams(
            temperature=options.temperature, max_output_tokens=options.max_tokens, seed=options.seed + number
        )
        async with self._slots:
            return await self._sampler.sample(options.tier or item.tier, item.prompt, sampling)
