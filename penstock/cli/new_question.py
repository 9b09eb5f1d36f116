"""`penstock plan new`: write a question file with every field, commented."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options
from penstock.cli.output import fail, print_line, print_written
from penstock.services.acceptance.pipeline import RULES

QUESTION = """\
# What `penstock plan --question FILE` plans for. Paths are relative to this file. Lines with # show what is taken by default,
# or an example. `cluster` and `models` may also be the content of such files.
cluster: cluster.yaml  # GPUs and nodes: { gpu: h100, nodes: 4, gpus_per_node: 8 }
models: models.yaml  # the tiers and their models: tiers: [{ name: small, model: llama-3.1-8b }, ...]
trace: trace.csv  # arrival_s, input_tokens, output_tokens; optionally cached_tokens
quality: judged.csv  # input_tokens, and {tier}_output_tokens, {tier}_judge_score of each tier

# Targets, of which at least one is needed.
min_quality: 85  # mean quality of the accepted answers, 0 to 100
# max_latency_s: 2  # of the objective, at the percentile
# goal: cost  # latency, quality or rate; cost without max_latency_s keeps 1.2 times the latency of the largest model alone
# objective: end-to-end  # first-token, pace or largest-tier (the slowest tier)
# percentile: 95
# max_utilisation: 0.75  # of what each tier sustains, the share that the rate may take
# allow_overload: false  # plan although no plan sustains the rate: for a burst
# confidence: 0.9  # with this probability min_quality holds for as many new prompts as were judged; 0.5: on average
# gpus: 16  # at most so many; default: all of the cluster
# dispatch: capacity  # round-robin

# The requests that are planned for, a stretch of the trace.
# requests: 1000  # default: as many as come in 20 latencies, see docs/how-to/planner.md
# seed: 1
# runs: 5  # other stretches of the trace, on which a latency target has to hold, too
# lengths: quality  # trace: token counts of the trace, the same for all tiers
# rate: 10  # requests per second; default: that of the trace
# ignore_cached: false  # compute all prompts whole, whatever the trace has cached

# The tiers as candidates.
# max_tiers: 3  # choose the best cascade of at most so many of them, up to three
# min_tiers: 1
# search_s: 10  # seconds after which no further form, drafter or rule is tried, once one is planned

# Rules in addition to thresholds, each chosen with the plan.
# rules:
"""


def new(
    file: Annotated[Path, typer.Argument(help="The file to write.", callback=options.writable)] = Path("question.yaml"),
) -> None:
    """Write a question file with every option, commented."""
    if file.exists():
        fail(f"{file}: exists already", 2)
    lines = (line for rule in RULES for line in rule.question.splitlines())
    file.write_text(QUESTION + "".join(f"#   {line}\n" for line in lines))
    print_written(file)
    print_line(f"edit it, then: penstock plan --question {file}")
