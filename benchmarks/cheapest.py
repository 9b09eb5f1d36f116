"""What the default question takes, by the number of GPUs: `penstock plan` for a least quality, as a command of its own.

The cheapest form (one model, a pair, the chain of three), thresholds, GPUs and shapes, of the examples' DeepSeek cascade, for
a request per second and four GPUs; CPU time and memory with the command's imports, kernels compiled; the share by which
another plan may be cheaper at most.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks import report
from tests.support.inputs import read_quality, read_site

EXAMPLES = Path("examples")
MODELS, CLUSTER = EXAMPLES / "deepseek-cascade.yaml", EXAMPLES / "cluster-4x8-h100.yaml"
GPUS = (32, 80, 256, 1024, 10_000)
SHARE = 0.6  # of the way from the first tier's quality to the last's


def row(gpus: int, min_quality: float) -> dict[str, Any]:
    """One question, asked and measured."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder, "cluster.yaml")
        cluster.write_text(yaml.safe_dump(yaml.safe_load(CLUSTER.read_text()) | {"nodes": gpus // 8}))
        files = ["--cluster", cluster, "--models", MODELS, "--trace", EXAMPLES / "trace.csv"]
        question = ["--quality", EXAMPLES / "judged.csv", "--min-quality", min_quality, "--rate", gpus / 4, "--json"]
        command = [sys.executable, "-m", "penstock.cli.main", "plan", *map(str, [*files, *question])]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            plan = json.load(process.stdout)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
    figures = {
        "gpus": gpus,
        "rate_per_s": gpus / 4,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "memory_mib": used.ru_maxrss / 1024,
        "gap": plan["optimality"]["gap"],
        **{key: plan[key] for key in ("horizon", "simulations", "latency_p95_s", "cost", "verdict")},
    }
    took = f"{figures['cpu_seconds']:.1f} s CPU, {figures['memory_mib']:,.0f} MiB"
    lasted = f"{plan['horizon']['latencies']:.1f} latencies, run for {plan['horizon']['run_latencies']:.1f}"
    print(f"{gpus:>6,} GPUs: {took}, {lasted}; {plan['verdict']}", flush=True)
    return figures


def run(_: int) -> None:
    judged = read_quality(EXAMPLES / "judged.csv", read_site(CLUSTER, MODELS).tiers)
    min_quality = judged.worst + SHARE * (judged.best - judged.worst)
    row(GPUS[0], min_quality)  # reads and compiles what is not there yet
    rows = [row(gpus, min_quality) for gpus in GPUS]
    print(report.write("cheapest", {"min_quality": min_quality, "rows": rows}))
