"""Sampling parameters and their limits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from penstock.types.limits import AtMost
from penstock.types.problems import FieldProblem
from penstock.types.prompts import MAX_TOKEN_ID
from penstock.types.ranges import COUNT, Within, own_range_problems
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
_BIAS = Within(-100, 100)  # as at OpenAI
MAX_BIASED_TOKENS = 1_024
MAX_STOP_TOKENS = 64
MAX_SEED = 2**63 - 1
TOKEN_ID = Within(0, MAX_TOKEN_ID)
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

    temperature: Annotated[float | None, Within(0, 2)] = None
    top_p: Annotated[float | None, Within(0, 1, above=True)] = None
    seed: Annotated[int | None, Within(0, MAX_SEED)] = None
    max_tokens: Annotated[int | None, COUNT] = None
    stop: Annotated[tuple[str, ...], AtMost(MAX_STOP_STRINGS, "strings")] = ()
    top_logprobs: Annotated[int | None, Within(0, MAX_TOP_LOGPROBS)] = None
    ignore_eos: bool = False
    structured_output: StructuredOutput | None = None
    top_k: Annotated[int | None, Within(0, MAX_TOP_K)] = None
    frequency_penalty: Annotated[float, Within(-MAX_PENALTY, MAX_PENALTY)] = 0.0
    presence_penalty: Annotated[float, Within(-MAX_PENALTY, MAX_PENALTY)] = 0.0
    repetition_penalty: Annotated[float, Within(0, MAX_PENALTY, above=True)] = 1.0
    logit_bias: Annotated[Mapping[int, float], AtMost(MAX_BIASED_TOKENS, "tokens")] = field(
        default_factory=dict, hash=False
    )
    min_p: Annotated[float, Within(0, 1)] = 0.0
    stop_token_ids: Annotated[tuple[int, ...], AtMost(MAX_STOP_TOKENS, "tokens"), TOKEN_ID] = ()

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
        yield from own_range_problems(self, path)
        for i, stop in enumerate(self.stop[:MAX_STOP_STRINGS]):
            if not 1 <= len(stop) <= MAX_STOP_CHARS:
                yield FieldProblem(f"{path}.stop[{i}]", f"must have 1 to {MAX_STOP_CHARS} characters")
        if 0 < len(self.logit_bias) <= MAX_BIASED_TOKENS:
            if not all(map(TOKEN_ID.holds, self.logit_bias)):
                yield FieldProblem(f"{path}.logit_bias", f"a token id must be {TOKEN_ID}")
            if not all(map(_BIAS.holds, self.logit_bias.values())):
                yield FieldProblem(f"{path}.logit_bias", f"must be {_BIAS}")
        if self.structured_output is not None:
            yield from self.structured_output.problems(f"{path}.structured_output")
            if self.ignore_eos:
                problem = "cannot be combined with structured_output, which says when to end"
                yield FieldProblem(f"{path}.ignore_eos", problem)
