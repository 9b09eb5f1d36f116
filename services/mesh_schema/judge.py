"""What a mesh file says of the judge and its scorers."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from services.mesh_schema.common import FROZEN, MAX_PROCESSES, Device


class MeshScorer(BaseModel):
    """One scorer of the judge."""

    model_config = FROZEN

    name: str
    """Its name in plans and requests."""
    kind: Literal[
        "judge-model",
        "llm",
        "confidence",
        "exact",
        "reward",
        "json-schema",
        "code",
        "consistency",
        "combined",
        "screened",
    ]
    """judge-model: a model that reads (prompt, answer) in one pass; llm: a language model asked for a grade;
    confidence: the token logprobs of the answer; exact: comparison with an expected answer; reward: a reward model that
    SGLang serves; json-schema: whether the answer fits a schema; code: whether the answer's program passes tests;
    consistency: how many further samples agree; combined: a logistic model over other scorers; screened: one scorer where it
    is sure, another one elsewhere."""
    model: str = ""
    """judge-model: a folder in Hugging Face format, or an id at the hub; reward: the same, of which only tokenizer and
    configuration are read. llm: the model's name at the endpoint."""
    endpoint: str = ""
    """llm: base URL of an OpenAI-compatible API, including `/v1`. reward: base URL of the SGLang server."""
    tier: str = ""
    """llm: the tier of this mesh whose model grades the answers; replaces endpoint and model. consistency: the tier that is
    sampled; empty: the one that gave the answer."""
    api_key_env: str = ""
    """llm or reward at an endpoint: name of the environment variable that holds the key. Empty: no key."""
    calibration: str = ""
    """Calibration file; combined: the file with the fitted weights. Empty: judge-model uses calibration.json in its model's
    folder, the others use none."""
    compare: Literal["text", "number", "final-answer"] = "final-answer"
    """exact, consistency: how two answers are compared: the text, the last number, or the text after the last `Answer:`."""
    tolerance: float = Field(default=1e-9, ge=0, lt=1)
    """exact with `compare: number`: largest relative difference of numbers that count as equal."""
    statistic: Literal["mean", "min"] = "mean"
    """confidence: the mean or the least logprob of the answer's tokens."""
    rubric: str = Field(default="", max_length=10_000)
    """llm: what to look at when grading; added to the task."""
    pairwise: bool = False
    """llm: compare the answer with the reference answer, in both orders, instead of grading it."""
    thinking_tokens: int = Field(default=0, ge=0, le=65_536)
    """llm: tokens that a model may use to think (until `</think>`) before its grade."""
    extra_body: dict[str, Any] = {}
    """llm at an endpoint: further fields of its requests, such as `chat_template_kwargs: {enable_thinking: false}`."""
    schema_file: str = ""
    """json-schema: file with the schema that all answers must fit. Empty: the schema of the request's structured output."""
    samples: int = Field(default=5, ge=1, le=64)
    """consistency: further answers drawn for each answer."""
    temperature: float = Field(default=0.7, ge=0.01, le=2)
    """consistency: temperature of the samples."""
    max_tokens: int = Field(default=512, ge=1)
    """consistency: largest length of a sample, in tokens."""
    scorers: tuple[str, ...] = ()
    """combined: names of the scorers that it combines. screened: the cheap scorer and the one that is asked where it is not
    sure."""
    margin: float = Field(default=2.0, gt=0, lt=50)
    """screened: the first scorer is sure of scores up to this and from 100 less this."""
    timeout_s: float = Field(default=8.0, gt=0)
    """llm, reward, consistency: timeout of one request. code: time that a program and its tests may take. At most the
    router's judge_timeout_s."""
    concurrency: int = Field(default=8, ge=1)
    """llm, reward, consistency, code: concurrent requests or programs."""
    tier_share: float = Field(default=0.25, gt=0, le=1)
    """llm of a tier, consistency: fraction of the tier's max_running that grades and samples may use at once, over all
    judges; each judge may use at least one slot of each worker."""


class MeshJudge(BaseModel):
    """The judge."""

    model_config = FROZEN

    replicas: int = Field(default=1, ge=0, le=MAX_PROCESSES)
    """Judge processes."""
    scorers: tuple[MeshScorer, ...] = (MeshScorer(name="confidence", kind="confidence"),)
    """The available scorers. Default: the confidence of the answer's tokens, which needs no model."""
    default_scorer: str = ""
    """The scorer of requests that name none. Empty: the first."""
    guards: tuple[Literal["truncated", "repeated"], ...] = ("truncated", "repeated")
    """Answers that score 0 without a scorer: `truncated`, cut off at max_output_tokens or the end of the context; `repeated`,
    the model got stuck in a loop. Empty answers and answers of a wrong form always score 0."""
    max_batch: int = Field(default=32, ge=1)
    """Answers scored in one forward pass."""
    max_batch_tokens: int = Field(default=4096, ge=64)
    """Tokens in one forward pass, padding included."""
    max_queued: int = Field(default=512, ge=1)
    """Answers of one scorer that may be scored or waiting at once. Further ones are refused, and so is an answer that could
    not be scored before its caller's deadline."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each judge."""
    device: Device = "cpu"
    """Device that runs the judge model."""
