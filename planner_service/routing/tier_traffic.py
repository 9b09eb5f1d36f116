"""What each tier, and a judge model, are sent of the requests that are planned for, under any routing. No I/O."""

import math

import numpy as np

from penstock.planner_service.routing.grading import Arrivals, Grading, TierLoad, tier_load
from penstock.planner_service.routing.quality import JudgedSample
from penstock.planner_service.simulator.workload import Bools, Floats, Ints, Workload


class TierTraffic:
    """All of it as if it came when the request arrives. sample, arrival_s, grading: see Deployer."""

    def __init__(self, sample: JudgedSample, arrival_s: Floats, grading: Grading | None) -> None:
        self._sample, self.arrival_s, self._grading = sample, arrival_s, grading
        self.rate_per_s = Workload(arrival_s, sample.input_tokens, sample.output_tokens[:, 0]).rate_per_s

    @property
    def has_rate(self) -> bool:
        """Whether the requests do not come all at once."""
        return math.isfinite(self.rate_per_s)

    def per_s(self, work: Workload) -> float:
        """The rate at which a tier's requests come: its share of all, as in sustained_load."""
        return self.rate_per_s * len(work) / len(self._sample)

    def answers(self, tier: int, processed: Bools) -> Bools:
        """(A, N) the answers, by the tier that gave them, that `tier` grades; A is 0 where it grades none."""
        graded = self._grading is not None and self._grading.tier == tier
        return self._sample.judged_answers(processed) if graded else processed[:0]

    def load(self, tier: int, chosen: Bools, answers: Bools, drafts: Ints | None = None) -> TierLoad:
        """What a tier is sent: chosen (N) requests, with drafts of so many tokens (N), and (A, N) answers to be graded."""
        graded = [(of, self._arrivals(these)) for of, these in enumerate(answers)]
        return tier_load(self._sample, tier, self._arrivals(chosen, drafts), self._grading, graded)

    def of_tier(self, tier: int, processed: Bools) -> TierLoad:
        """What a tier is sent where these requests reach each tier, (C, N)."""
        answers, drafts = self.answers(tier, processed), self._sample.draft_tokens(tier, processed)
        return self.load(tier, processed[tier], answers, drafts)

    def of_judge(self, grading: Grading, processed: Bools) -> TierLoad:
        """What the replicas of a judge model are sent."""
        return self.load(grading.tier, np.zeros(len(self._sample), np.bool_), self._sample.judged_answers(processed))

    def _arrivals(self, these: Bools, drafts: Ints | None = None) -> Arrivals:
        rows = np.flatnonzero(these)
        return Arrivals(rows, self.arrival_s[rows], None if drafts is None else drafts[rows])
