"""Grading as load: what judges, and what it is sent. No I/O.

The answer of every tier but the last is graded before it is accepted or escalates (for the best answer, that of the last as
well if there is another), so how many grading requests there are follows from thresholds and skip rule. A tier that grades is
sent prompt, answer and question, replies with a few tokens, and serves grading requests before all waiting ones. A judge
model reads prompt and answer in one forward pass. Grading requests are computed whole: their prompts begin with the question,
not like the request that they are about.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from penstock.planner_service.deployment.saturation import saturated_per_s
from penstock.planner_service.routing.quality import JudgedSample
from penstock.planner_service.simulator import EngineLimits, Replica
from penstock.planner_service.simulator.workload import Bools, Floats, Ints, Workload
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel

QUESTION_TOKENS = 150  # instructions, marks and chat template of the judge's grading request: about 450 characters
REPLY_TOKENS = 4  # what the judge allows for a grade
GRADES_FIRST = 1  # priority of grading requests; a tier's own have 0
OWN = -1
UNLIMITED_TOKENS = 1 << 40  # a judge model keeps no KV between forward passes


@dataclass(frozen=True, slots=True)
class Grading:
    """tier: the one that grades, by number; one more than the last where `replicas` of a judge model do.

    question_tokens: of a grading request, in addition to prompt and answer. reply_tokens: of a grade, thoughts included.
    model: the judge model's name, else empty.
    """

    tier: int
    question_tokens: int = QUESTION_TOKENS
    reply_tokens: int = REPLY_TOKENS
    replicas: tuple[Replica, ...] = ()
    model: str = ""

    @classmethod
    def by_judge_model(
        cls, tiers: int, model: str, replicas: int, latency: StepLatencyModel, limits: EngineLimits
    ) -> Self:
        """Replicas of a judge model, each of which scores a batch of answers in a forward pass.

        latency: of a forward pass. limits: max_running is the answers, max_step_tokens the tokens of a batch.
        """
        replica = Replica(ReplicaShape(1, 1), latency, UNLIMITED_TOKENS, limits)
        return cls(tiers, 0, 1, (replica,) * replicas, model)

    @property
    def by_tier(self) -> bool:
        """Whether a tier grades, not a judge model."""
        return not self.replicas

    def sustained_per_s(self, work: Workload) -> float:
        """Answers of such lengths that the replicas of a judge model score per second."""
        return len(self.replicas) * saturated_per_s(self.replicas[:1], work)[0]

    def input_tokens(self, sample: JudgedSample, tier: int) -> Ints:
        """(N) tokens of the grading requests for the answers of `tier`."""
        return sample.input_tokens + sample.output_tokens[:, tier] + self.question_tokens

    def longest_tokens(self, sample: JudgedSample) -> int:
        """Of one grading request and its reply; 0 where no answer is graded."""
        graded = range(len(sample.tiers) - 1 if sample.streams_last else len(sample.tiers))
        return max((int(self.input_tokens(sample, tier).max()) + self.reply_tokens for tier in graded), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class TierLoad:
    """What a tier is sent: M requests in order of arrival.

    row (M): of the sample. graded (M): the tier whose answer is graded, OWN for the tier's own requests.
    """

    work: Workload
    row: Ints
    graded: Ints

    @property
    def own(self) -> Bools:
        """(M) whether a request is one of the tier's own."""
        return np.asarray(self.graded == OWN, np.bool_)

    @property
    def counted(self) -> Bools:
        """(M) the requests whose latency is the tier's: its own; grading requests where it does nothing else."""
        return self.own if self.own.any() else np.ones(len(self.row), np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """Which rows of a sample come, and when. row (M), at_s (M).

    draft_tokens (M): see `JudgedSample.draft_tokens`; None for no drafts.
    """

    row: Ints
    at_s: Floats
    draft_tokens: Ints | None = None


def tier_load(
    sample: JudgedSample,
    tier: int,
    own: Arrivals,
    grading: Grading | None = None,
    answers: Sequence[tuple[int, Arrivals]] = (),
) -> TierLoad:
    """What `tier` is sent: its own requests and, if it grades, answers.

    own: in order of arrival. answers: (the tier that gives them, when they are complete).
    """
    drafts = np.zeros(len(own.row), np.int64) if own.draft_tokens is None else own.draft_tokens
    if grading is None or grading.tier != tier:
        work = Workload(own.at_s, *sample.lengths(tier, own.row, drafts), cached_tokens=sample.cached[own.row])
        return TierLoad(work, own.row, np.full(len(own.row), OWN, np.int64))
    nothing = np.zeros(0, np.int64)  # a judge model is none of the sample's tiers
    lengths = sample.lengths(tier, own.row, drafts) if len(own.row) else (nothing, nothing)
    parts = [(own.row, own.at_s, *lengths, sample.cached[own.row], np.full(len(own.row), OWN, np.int64))]
    for of, complete in answers:
        inputs, ones = grading.input_tokens(sample, of)[complete.row], np.ones(len(complete.row), np.int64)
        parts.append((complete.row, complete.at_s, inputs, grading.reply_tokens * ones, 0 * ones, of * ones))
    row, arrival_s, inputs, outputs, cached, graded = (np.concatenate(column) for column in zip(*parts, strict=True))
    priority = np.where(graded == OWN, 0, GRADES_FIRST).astype(np.int64)
    order = np.argsort(arrival_s, kind="stable")
    work = Workload(arrival_s[order], inputs[order], outputs[order], priority[order], cached[order])
    return TierLoad(work, row[order], graded[order])
