"""Whether a text is the same alone, eight at once, and with itself as draft; if not, that its tokens part at a near tie.

llama.cpp takes other kernels for other numbers of rows, and they round otherwise. So log-probabilities differ a little, and
where the two most likely tokens are closer than that, the other one is taken. Measured over all tokens before texts part: by
how much the difference of their log-probabilities changes. Where texts part: that difference, alone.
"""

from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.real_models.costs import Job, Ran, run_all
from benchmarks.real_models.generate import AT_ONCE, loaded
from benchmarks.real_models.prompts import MODELS, tasks
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.speculation.given_answer import RunAcceptance

PROMPTS, OUTPUT_TOKENS = 24, 64


def measure() -> None:
    models = {model: _of(loaded(model)) for model in MODELS}
    figures = {"prompts": PROMPTS, "output_tokens": OUTPUT_TOKENS, "at_once": AT_ONCE, "models": models}
    print(report.write("real_models/ties", figures))


def _of(core: EngineCore) -> dict[str, Any]:
    jobs, acceptance = [Job(task.text, OUTPUT_TOKENS) for task in tasks("humaneval")[:PROMPTS]], RunAcceptance()
    alone = [run_all(core, [job], with_gaps=True) for job in jobs]
    drafts = [Job(job.text, OUTPUT_TOKENS, ran.outputs[0]) for job, ran in zip(jobs, alone, strict=True)]
    one = _joined(alone)
    ways = {
        "at_once": run_all(core, jobs, with_gaps=True),
        "drafted": _joined([run_all(core, [job], acceptance, with_gaps=True) for job in drafts]),
    }
    figures = {way: _compared(one, ran) for way, ran in ways.items()}
    print(figures, flush=True)
    return figures


def _joined(runs: list[Ran]) -> Ran:
    """Runs of one prompt each, as one of all of them."""
    prompt_tokens, cpu_s = sum(ran.prompt_tokens for ran in runs), sum(ran.cpu_s for ran in runs)
    return Ran(prompt_tokens, [ran.outputs[0] for ran in runs], [ran.gaps[0] for ran in runs], cpu_s)


def _compared(alone: Ran, other: Ran) -> dict[str, Any]:
    changes, parted = list[float](), list[float]()
    for one, two, one_gaps, two_gaps in zip(alone.outputs, other.outputs, alone.gaps, other.gaps, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
        changes += [abs(a - b) for a, b in zip(one_gaps[:at], two_gaps[:at], strict=True)]
        if at < min(len(one), len(two)):
            parted.append(round(one_gaps[at], 4))
    shares = dict(zip(("median", "p99", "most"), np.quantile(changes, (0.5, 0.99, 1.0)).round(4).tolist(), strict=True))
    same = len(alone.outputs) - len(parted)
    return {"same": same, "tokens": len(changes), "change": shares, "parted_at": sorted(parted)}
