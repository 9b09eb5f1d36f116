"""What a mesh file says of the judge and its scorers."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.services.mesh_schema.common import FROZEN, MAX_PROCESSES, Device


class MeshScorer(BaseModel):
    """One scorer of the judge. Its other fields are the options of its kind."""

    model_config = FROZEN | ConfigDict(extra="allow")

    name: str
    """Its name in plans and requests."""
    kind: str
    """What it is, by its entry point: see the kinds below; installed packages may add others."""
    calibration: str = ""
    """Calibration file, which maps raw scores to scores from 0 to 100. Empty: none, unless the kind says otherwise."""

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of its kind, unread."""
        return self.model_extra or {}


WITHOUT_LOGPROBS = "default-or-grade"
"""The scorer of a mesh file that names none, where answers may come without log-probabilities."""


def default_scorers(calibration: str = "", grader: str = "") -> tuple[MeshScorer, ...]:
    """Those of a mesh file that names none: the last one, of which the others are parts, is the default.

    grader: the tier whose model grades answers that come without log-probabilities, unless their prompts show examples;
        empty: all come with some.
    """
    scorers: list[dict[str, Any]] = [
        {"name": "confidence", "kind": "confidence"},
        {"name": "examples", "kind": "code", "tests": "prompt", "sandbox": "optional"},
        {"name": "default", "kind": "combined", "scorers": ("confidence", "examples"), "calibration": calibration},
    ]
    if grader:
        scorers += [
            {"name": "grade", "kind": "llm", "tier": grader},
            {"name": "examples-or-grade", "kind": "screened", "scorers": ("examples", "grade"), "margin": 2},
            {"name": WITHOUT_LOGPROBS, "kind": "screened", "scorers": ("default", "examples-or-grade"), "margin": 50},
        ]
    return tuple(map(MeshScorer.model_validate, scorers))


class MeshJudge(BaseModel):
    """The judge."""

    model_config = FROZEN

    replicas: int = Field(default=1, ge=0, le=MAX_PROCESSES)
    """Judge processes."""
    scorers: tuple[MeshScorer, ...] = default_scorers()
    """The available scorers. Default: `default`, the confidence of the answer's tokens (`confidence`) and whether its program
    passes the examples that the prompt shows (`examples`), combined; none needs a model."""
    calibration: str = ""
    """The calibration file of the scorer `default`, where `scorers` is not set."""
    default_scorer: str = ""
    """The scorer of requests that name none. Empty: the first that is no part of another one."""
    guards: tuple[Literal["truncated", "repeated"], ...] = ("truncated", "repeated")
    """Answers that score 0 without a scorer: `truncated`, cut off at max_output_tokens or the end of the context; `repeated`,
    the model got stuck in a loop. Empty answers and answers of a wrong form always score 0."""
    max_batch: int = Field(default=32, ge=1)
    """judge-model: answers scored in one forward pass."""
    max_batch_tokens: int = Field(default=4096, ge=64)
    """judge-model: tokens in one forward pass, padding included."""
    max_queued: int = Field(default=512, ge=1)
    """Answers of one scorer that may be scored or waiting at once. Further ones are refused, and so is an answer that could
    not be scored before its caller's deadline."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each judge."""
    device: Device = "cpu"
    """judge-model: device that runs the model."""

    @model_validator(mode="before")
    @classmethod
    def _calibrated_default(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("calibration"):
            if "scorers" in data:
                raise ValueError("calibration: is for the default scorer; give it to one of `scorers` instead")
            return {**data, "scorers": default_scorers(str(data["calibration"]))}
        return data

    @property
    def used_scorer(self) -> str:
        """The name of the scorer of requests that name none."""
        parts = {part for scorer in self.scorers for part in scorer.options.get("scorers") or ()}
        whole = [scorer.name for scorer in self.scorers if scorer.name not in parts]
        return self.default_scorer or next(iter(whole), "")
