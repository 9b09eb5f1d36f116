"""The six scenarios of SLOs-Serve (tables 2 to 4) on published A100 profiles: lengths drawn, arrivals recorded.

Lengths are DRAWN: of each length the paper gives mean, standard deviation and 99th percentile; here it has a gamma
distribution cut at that percentile, with that mean and deviation. Arrivals are those of Azure's conversation and code
traces, a stretch of them from a place drawn by the seed, its gaps stretched to the rate. Models: OPT-13B by DistServe's
formulas; Llama 2 7B (ToolLlama's) and Llama 3 8B (a distilled DeepSeek-R1's; for the paper's Qwen of 1.5B there is no public
profile) by Vidur's tables. SLOs are table 3's: the first token within 3 or 5 times that of an idle replica, 50 or 100 ms per
token.
"""

import functools
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import gamma

from benchmarks.public_data import public
from benchmarks.published_tables import Wanted, import_distserve, import_vidur
from penstock.planner_service.files.hardware import gpu_of_catalogue, model_of_catalogue
from penstock.planner_service.files.measured import read_trace
from penstock.planner_service.simulator import EngineLimits, Replica, Workload
from penstock.planner_service.simulator.judged import NEVER_LATER, Promises
from penstock.planner_service.simulator.workload import Floats, Ints
from penstock.services.domain.hardware import ClusterSpec, ReplicaShape, Runtime
from penstock.services.domain.latency import StepLatencyModel, StepLoad

TIGHT_TTFT, LOOSE_TTFT = 3.0, 5.0  # times the first token of an idle replica
TIGHT_TPOT_S, LOOSE_TPOT_S = 0.05, 0.1
CONVERSATION, CODE = "azure2023_conv", "azure2023_code_first_half"
QUANTILES = (np.arange(4000) + 0.5) / 4000


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens: mean, 99th percentile and standard deviation, as in table 4."""

    mean: float
    p99: float
    std: float

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        shape, scale = _gamma(self)
        return np.clip(np.rint(gamma.ppf(rng.random(count), shape, scale=scale)), 1, self.p99).astype(np.int64)


@functools.cache
def _gamma(lengths: Lengths) -> tuple[float, float]:
    """(shape, scale) of the gamma distribution that has the mean and the deviation once it is cut at the percentile."""

    def off(logs: Floats) -> Floats:
        values = np.minimum(gamma.ppf(QUANTILES, np.exp(logs[0]), scale=np.exp(logs[1])), lengths.p99)
        return np.array([values.mean() / lengths.mean - 1, values.std() / lengths.std - 1])

    start = np.log([(lengths.mean / lengths.std) ** 2, lengths.std**2 / lengths.mean])
    shape, scale = np.exp(least_squares(off, start).x)
    return float(shape), float(scale)


@dataclass(frozen=True, slots=True)
class Application:
    """What one kind of request looks like. thinking: tokens in front of the output, at the tight pace; the output is loose.

    rounds: mean and deviation of the prompts with replies that make up a request (tool calls); all but the last are tight.
    """

    arrivals: str
    prompt: Lengths
    output: Lengths
    ttft_times: float
    tpot_s: float
    thinking: Lengths | None = None
    rounds: tuple[float, float] | None = None


CHATBOT = Application(CONVERSATION, Lengths(763, 1591, 424), Lengths(266, 619, 160), LOOSE_TTFT, LOOSE_TPOT_S)
CODER = Application(CODE, Lengths(847, 2010, 617), Lengths(26, 232, 47), LOOSE_TTFT, TIGHT_TPOT_S)
SUMMARIZER = Application(CONVERSATION, Lengths(1333, 1946, 444), Lengths(202, 1508, 234), TIGHT_TTFT, LOOSE_TPOT_S)
TOOLS = Application(CODE, Lengths(690, 2131, 356), Lengths(116, 363, 66), TIGHT_TTFT, LOOSE_TPOT_S, rounds=(2.7, 1.1))
REASONING = Application(
    CONVERSATION,
    Lengths(127, 421, 83),
    Lengths(803, 1650, 280),
    TIGHT_TTFT,
    LOOSE_TPOT_S,
    thinking=Lengths(4693, 7297, 1442),
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Applications in equal parts, on one model. bursty: its arrivals are the code trace's alone.

    long_replies: of minutes, so that backlog shows in long runs only.
    """

    name: str
    applications: tuple[Application, ...]
    model: str
    long_replies: bool = False

    @property
    def bursty(self) -> bool:
        return all(application.arrivals == CODE for application in self.applications)


SCENARIOS = (
    Scenario("chatbot", (CHATBOT,), "opt-13b"),
    Scenario("coder", (CODER,), "opt-13b"),
    Scenario("summarizer", (SUMMARIZER,), "opt-13b"),
    Scenario("mixed", (CHATBOT, CODER, SUMMARIZER), "opt-13b"),
    Scenario("toolllm", (TOOLS,), "llama-2-7b"),
    Scenario("reasoning", (REASONING,), "deepseek-r1-distill-llama-8b", long_replies=True),
)


@functools.cache
def replica(model: str) -> Replica:
    """One A100 with 80 GB that serves the model, by its published profile."""
    cluster = ClusterSpec(gpu_of_catalogue("a100-80gb"), 1, 1, 25e9)
    spec, shape, limits = model_of_catalogue(model), ReplicaShape(1, 1), EngineLimits()
    if model == "opt-13b":
        source = Wanted("facebook/opt-13b", spec, shape, cluster, Runtime(), limits)
        return import_distserve(public("perf/distserve_a100_profiles.json"), source).replica
    name = {
        "llama-2-7b": "meta-llama/Llama-2-7b-hf",
        "deepseek-r1-distill-llama-8b": "meta-llama/Meta-Llama-3-8B",
    }[model]
    tables = ("vidur_linear_ops_a100_a40.csv.gz", "vidur_attention_a100.csv.gz")
    source = Wanted(name, spec, shape, cluster, Runtime(), limits)
    return import_vidur([public(f"perf/{table}") for table in tables], source).replica


def idle_ttft_s(latency: StepLatencyModel, prompt: Ints) -> Floats:
    """(N) seconds to the first token on an idle replica: one step with the whole prompt."""
    loads = [StepLoad(int(p), int(p), 0.5 * p * (p + 1)) for p in prompt]
    return np.array([latency.step_s(load) for load in loads])


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Requests of a scenario at one rate. request (N): the number of the request that an arrival is a round of."""

    work: Workload
    promises: Promises
    request: Ints

    @property
    def requests(self) -> int:
        return int(self.request.max()) + 1


def stretch(scenario: Scenario, latency: StepLatencyModel, per_s: float, requests: int, seed: int) -> Stretch:
    """So many requests at so many per second; of one seed the same requests at every rate, only closer or farther apart."""
    parts = [
        _part(
            application,
            latency,
            per_s / len(scenario.applications),
            requests // len(scenario.applications),
            seed + 101 * i,
        )
        for i, application in enumerate(scenario.applications)
    ]
    number = np.cumsum([0, *(part[-1].max() + 1 for part in parts)])[:-1]
    columns = [np.concatenate([part[k] for part in parts]) for k in range(7)]
    request = np.concatenate([part[-1] + first for part, first in zip(parts, number, strict=True)])
    order = np.argsort(columns[0], kind="stable")
    arrival_s, prompt, output, ttft_s, tpot_s, later_s, later_from = (column[order] for column in columns)
    return Stretch(Workload(arrival_s, prompt, output), Promises(ttft_s, tpot_s, later_s, later_from), request[order])


@functools.cache
def _arrivals(name: str) -> Floats:
    return read_trace(public(f"traces/{name}.csv.gz")).arrival_s


def _part(
    application: Application, latency: StepLatencyModel, per_s: float, requests: int, seed: int
) -> tuple[Floats, Ints, Ints, Floats, Floats, Floats, Ints, Ints]:
    """arrival_s, prompt, output, ttft_s, tpot_s, later_tpot_s, later_from, request; a row per round."""
    rng = np.random.default_rng(seed)
    recorded = _arrivals(application.arrivals)
    first = int(rng.integers(len(recorded) - requests))
    at_s = recorded[first : first + requests] - recorded[first]
    at_s = at_s * ((requests - 1) / at_s[-1] / per_s)
    rounds = np.ones(requests, np.int64)
    if application.rounds is not None:
        rounds = np.maximum(1, np.rint(rng.normal(*application.rounds, requests))).astype(np.int64)
    request = np.repeat(np.arange(requests), rounds)
    rows = len(request)
    last = np.append(request[1:] != request[:-1], True)
    prompt, output = application.prompt.draw(rng, rows), application.output.draw(rng, rows)
    ttft_s = application.ttft_times * idle_ttft_s(latency, prompt)
    tpot_s = np.where(last, application.tpot_s, TIGHT_TPOT_S)
    later_s, later_from = tpot_s, np.full(rows, NEVER_LATER)
    if application.thinking is not None:
        thinking = application.thinking.draw(rng, rows)
        later_from, output = thinking, output + thinking
        tpot_s = np.full(rows, TIGHT_TPOT_S)
    # a round comes when the one before was promised to end
    promised_s = ttft_s + (output - 1) * tpot_s
    before_s = np.cumsum(promised_s) - promised_s
    begins = np.cumsum(rounds) - rounds
    offset_s = before_s - np.repeat(before_s[begins], rounds)
    return np.repeat(at_s, rounds) + offset_s, prompt, output, ttft_s, tpot_s, later_s, later_from, request
