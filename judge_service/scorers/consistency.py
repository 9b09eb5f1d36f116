"""Self-consistency: draws further answers to the same prompt and counts those that agree (Wang et al. 2023)."""

import asyncio
from collections.abc import Sequence as Seq
from typing import Protocol

from pydantic import Field

from penstock.judge_service.clients.tier_scorer import TierScorer
from penstock.judge_service.scoring.comparison import Compare, same
from penstock.judge_service.scoring.extension import ScorerSite
from penstock.judge_service.scoring.interface import RawScore, Scorer
from penstock.services.background import gathered
from penstock.types.judging import JudgedAnswer
from penstock.types.prompts import Prompt
from penstock.types.sampling import SamplingParams


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


FIRST_SEED = 1
"""Of the first sample of an answer; those of the next ones follow."""


class ConsistencyScorer(Scorer):
    """raw: the share of samples that agree with the answer, 0 to 1. Score without calibration: the same in percent.

    The samples' seeds are fixed, so an answer gets the same score again.
    """

    def __init__(self, sampler: Sampler, options: "Consistency") -> None:
        self._sampler, self._options, self._slots = sampler, options, asyncio.Semaphore(options.concurrency)

    async def start(self) -> None:
        await self._sampler.start()

    async def close(self) -> None:
        await self._sampler.close()

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        return [RawScore.of_share(share) for share in await gathered(*map(self._agreeing, answers))]

    async def _agreeing(self, item: JudgedAnswer) -> float:
        """The share of samples that agree with an answer."""
        count = self._options.samples
        samples = await gathered(*(self._sample(item, i) for i in range(count)))
        return sum(same(self._options.compare, sample, item.answer) for sample in samples) / count

    async def _sample(self, item: JudgedAnswer, number: int) -> str:
        options = self._options
        seed = FIRST_SEED + number
        sampling = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=seed)
        async with self._slots:
            return await self._sampler.sample(options.tier or item.tier, item.prompt, sampling)


class Consistency(TierScorer):
    """`consistency`: how many further samples agree."""

    tier: str = ""
    """The tier that is sampled. Empty: the one that gave the answer."""
    compare: Compare = "final-answer"
    """How two answers are compared: the text, the last number, or the text after the last `Answer:`."""
    samples: int = Field(default=5, ge=1, le=64)
    """Further answers drawn for each answer."""
    temperature: float = Field(default=0.7, ge=0.01, le=2)
    """Temperature of the samples."""
    max_tokens: int = Field(default=512, ge=1)
    """Largest length of a sample, in tokens."""

    def cost(self) -> str:
        return f"{self.samples} further answers of {self.tier or 'the same tier'}, of at most {self.max_tokens} tokens each"

    def build(self, site: ScorerSite) -> ConsistencyScorer:
        tiers = [self.tier] if self.tier else [tier.name for tier in site.mesh.tiers]
        return ConsistencyScorer(self.chat(site, tiers), self)
