"""Sampling parameters and their limits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from penstock.types.limits import AtMost
from penstock.types.problems import FieldProblem
from penstock.types.prompts import MAX_TOKEN_ID
from penstock.types.structured import StructuredOutput
from penstock.types.values import replaced, value_type

MIN_TEMPERATURE = 1e-4
"""Lower temperatures mean greedy decoding. At this one, a token whose logit is 0.002 below the best is drawn once in 10^8
times; far lower ones would exceed the range of float32."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_TOP_K = 2**31 - 1
MAX_TOP_LOGPROBS = 20
MAX_PENALTY = 2.0  # of frequency and presence, either way, and of repetition; as at OpenAI and SGLang
MAX_BIAS = 100.0  # either way, as at OpenAI
MAX_BIASED_TOKENS = 1_024
MAX_STOP_TOKENS = 64
MAX_SEED = 2**63 - 1
SAMPLING_DEFAULTS: tuple[Literal["temperature", "top_p", "top_k"], ...] = ("temperature", "top_p", "top_k")
"""The sampling parameters that a model may have defaults for."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a model samples with where the client sets nothing. None: as `SamplingParams` has it."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


NO_DEFAULTS = SamplingDefaults()


@value_type(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters.

    temperature: from 0 (greedy) to 2. Values below MIN_TEMPERATURE are replaced by 0, for all engines.
    top_k: tokens are drawn from so many most likely ones; 0: no limit.
    top_p: tokens are drawn from the smallest set of most likely tokens with at least this share of what top_k leaves.
    seed: determines, with the output position, every random number, so that a reply does not depend on the instance or the
        batch; None until the router draws one.
    max_tokens: None: as many as the context allows.
    top_logprobs: None: no logprobs; 0: of the chosen tokens; n: also of the n most likely tokens.
    structured_output: the form that the reply must have; None: free text.
    frequency_penalty, presence_penalty: subtracted from a token's logit for each time that the reply has it, and once if it
        has it. repetition_penalty: divides the logit of a token that the reply has, or multiplies it if it is negative.
    logit_bias: what is added to the logits of tokens, by id; -100 to 100.
    min_p: tokens are drawn from those with at least this share of the probability of the most likely one.
    stop_token_ids: the reply ends before the first of these tokens.
    Where temperature, top_p or top_k is None, the model's default holds (`with_defaults`), or else 1, 1 and 0.
    """

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: Annotated[tuple[str, ...], AtMost(MAX_STOP_STRINGS, "strings")] = ()
    top_logprobs: int | None = None
    ignore_eos: bool = False
    structured_output: StructuredOutput | None = None
    top_k: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[Mapping[int, float], AtMost(MAX_BIASED_TOKENS, "tokens")] = field(
        default_factory=dict, hash=False
    )
    min_p: float = 0.0
    stop_token_ids: Annotated[tuple[int, ...], AtMost(MAX_STOP_TOKENS, "tokens")] = ()

    def __post_init__(self) -> None:
        if self.temperature is not None and 0 <= self.temperature < MIN_TEMPERATURE:  # includes -0.0
            object.__setattr__(self, "temperature", 0.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalizes(self) -> bool:
        """Whether a token's logit depends on the tokens of the reply so far."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)

    def with_seed(self, seed: int) -> "SamplingParams":
        return self if self.seed is not None else replaced(self, seed=seed)

    def with_defaults(self, defaults: "SamplingDefaults | None") -> "SamplingParams":
        """The parameters with which a model computes: its defaults where the client set nothing. None: it has its own."""
        if defaults is None or defaults is NO_DEFAULTS:
            return self
        unset = [name for name in SAMPLING_DEFAULTS if getattr(self, name) is None]
        values = {name: value for name in unset if (value := getattr(defaults, name)) is not None}
        return replaced(self, **values) if values else self

    def problems(self, path: str) -> Iterator[FieldProblem]:
        if self.temperature is not None and not 0 <= self.temperature <= 2:  # refuses NaN, too
            yield FieldProblem(f"{path}.temperature", f"must be from 0 to 2, not {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            yield FieldProblem(f"{path}.top_p", f"must be greater than 0 and at most 1, not {self.top_p}")
        if self.top_k is not None and not 0 <= self.top_k <= MAX_TOP_K:
            yield FieldProblem(f"{path}.top_k", f"must be from 0 to {MAX_TOP_K}, not {self.top_k}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            yield FieldProblem(f"{path}.seed", f"must be from 0 to {MAX_SEED}, not {self.seed}")
        if self.max_tokens is not None and self.max_tokens < 1:
            yield FieldProblem(f"{path}.max_tokens", "must be at least 1")
        if len(self.stop) > MAX_STOP_STRINGS:
            yield FieldProblem(f"{path}.stop", f"at most {MAX_STOP_STRINGS} strings, not {len(self.stop)}")
        for i, stop in enumerate(self.stop[:MAX_STOP_STRINGS]):
            if not 1 <= len(stop) <= MAX_STOP_CHARS:
                yield FieldProblem(f"{path}.stop[{i}]", f"must have 1 to {MAX_STOP_CHARS} characters")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            yield FieldProblem(f"{path}.top_logprobs", f"must be from 0 to {MAX_TOP_LOGPROBS}")
        if self._logit_changes() != _NO_LOGIT_CHANGES:
            yield from self._logit_problems(path)
        if self.structured_output is not None:
            yield from self.structured_output.problems(f"{path}.structured_output")
            if self.ignore_eos:
                yield FieldProblem(
                    f"{path}.ignore_eos", "cannot be combined with structured_output, which says when to end"
                )

    def _logit_changes(self) -> tuple[object, ...]:
        """The fields that `_logit_problems` checks."""
        return (
            self.frequency_penalty,
            self.presence_penalty,
            self.repetition_penalty,
            self.logit_bias,
            self.min_p,
            self.stop_token_ids,
        )

    def _logit_problems(self, path: str) -> Iterator[FieldProblem]:
        """The problems of what changes logits or ends a reply at a token."""
        for name in ("frequency_penalty", "presence_penalty"):
            if not -MAX_PENALTY <= (value := getattr(self, name)) <= MAX_PENALTY:  # refuses NaN, too
                yield FieldProblem(f"{path}.{name}", f"must be from {-MAX_PENALTY:g} to {MAX_PENALTY:g}, not {value}")
        if not 0 < self.repetition_penalty <= MAX_PENALTY:
            problem = f"must be greater than 0 and at most {MAX_PENALTY:g}, not {self.repetition_penalty}"
            yield FieldProblem(f"{path}.repetition_penalty", problem)
        if not 0 <= self.min_p <= 1:
            yield FieldProblem(f"{path}.min_p", f"must be from 0 to 1, not {self.min_p}")
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            yield FieldProblem(f"{path}.logit_bias", f"at most {MAX_BIASED_TOKENS} tokens, not {len(self.logit_bias)}")
        elif self.logit_bias:
            if not all(0 <= token <= MAX_TOKEN_ID for token in self.logit_bias):
                yield FieldProblem(f"{path}.logit_bias", f"a token id must be from 0 to {MAX_TOKEN_ID}")
            if not all(-MAX_BIAS <= bias <= MAX_BIAS for bias in self.logit_bias.values()):
                yield FieldProblem(f"{path}.logit_bias", f"must be from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            problem = f"at most {MAX_STOP_TOKENS} tokens, not {len(self.stop_token_ids)}"
            yield FieldProblem(f"{path}.stop_token_ids", problem)
        elif not all(0 <= token <= MAX_TOKEN_ID for token in self.stop_token_ids):
            yield FieldProblem(f"{path}.stop_token_ids", f"a token id must be from 0 to {MAX_TOKEN_ID}")


_NO_LOGIT_CHANGES = SamplingParams()._logit_changes()
