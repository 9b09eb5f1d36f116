"""Programs that are run with tests as an entry point: `code`."""

from typing import TYPE_CHECKING, Literal, Self

from penstock.judge_service.scoring.extension import ScorerSite, TimedScorer

if TYPE_CHECKING:
    from penstock.judge_service.scorers.code.scorer import CodeScorer


class Code(TimedScorer):
    """`code`: whether the answer's program passes tests, in a sandbox. `timeout_s` is for the program with its tests."""

    tests: Literal["reference", "prompt"] = "reference"
    """Where the tests are: the reference, a Python program; or the examples that the prompt itself shows, such as doctests or
    `f(1) == 2`. An answer to a prompt that shows none has a score in the middle, as has one without a program."""
    sandbox: Literal["required", "optional"] = "required"
    """`optional`: where the sandbox does not work, the judge starts all the same and runs nothing."""

    def patient(self) -> Self:
        return self  # its limit is part of what its score means

    def needs_reference(self) -> bool:
        return self.tests == "reference"

    def stated_weight(self) -> tuple[float, float] | None:
        return (6.0, 0.5) if self.tests == "prompt" else None

    def build(self, site: ScorerSite) -> "CodeScorer":
        from penstock.judge_service.scorers.code.sandbox import Sandbox, SandboxLimits
        from penstock.judge_service.scorers.code.scorer import CodeScorer

        return CodeScorer(
            Sandbox(SandboxLimits(self.limit_s(site))),
            concurrency=self.concurrency,
            from_prompt=self.tests == "prompt",
            optional=self.sandbox == "optional",
        )
