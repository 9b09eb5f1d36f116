"""Length stages: the ranges of sequence lengths that instances of a tier serve. No I/O."""

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.services.domain.errors import check, invalid
from penstock.types.plans import Stage
from penstock.types.problems import FieldProblem
from penstock.types.ranges import own_range_problems


def stage_problems(stages: tuple[Stage, ...], path: str) -> Iterator[FieldProblem]:
    """The problems of stages that do not cover [0, most) in order; none without stages. `path`: the field."""
    at = 0
    for i, stage in enumerate(stages):
        if stage.from_tokens != at:
            yield FieldProblem(f"{path}[{i}].from_tokens", f"must be {at}, the end of the previous stage")
        if stage.to_tokens <= stage.from_tokens:
            yield FieldProblem(f"{path}[{i}].to_tokens", f"must be greater than from_tokens ({stage.from_tokens})")
        yield from own_range_problems(stage, f"{path}[{i}]")
        at = stage.to_tokens


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Stages in order that cover [0, max_tokens).

    Raises:
        InvalidRequest: They do not cover it.
    """

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise invalid("stages", "at least one is needed")
        check(stage_problems(self.stages, "stages"))

    @classmethod
    def single(cls, instances: int, max_tokens: int) -> "StageLayout":
        """One stage: every instance serves all lengths."""
        return cls((Stage(0, max_tokens, instances),))

    @property
    def max_tokens(self) -> int:
        return self.stages[-1].to_tokens

    @property
    def instances(self) -> int:
        return sum(stage.instances for stage in self.stages)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The first length of every stage but the first, where sequences move to the next stage."""
        return tuple(stage.from_tokens for stage in self.stages[1:])

    def stage_of_instance(self, instance: int) -> int:
        """The stage of the instance with this index (from 0); the last one for indices beyond the layout."""
        ends = [*itertools.accumulate(stage.instances for stage in self.stages[:-1])]
        return bisect.bisect_right(ends, instance)
