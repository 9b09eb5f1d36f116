"""What is planned for: profiles of the tiers on this machine, a judged sample, and the files of `penstock plan`.

Everything is made by the commands that users run: `penstock profile`, `measure` and `plan`.
"""

import asyncio
import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.end_to_end.systems import System
from penstock.planner_service.files.measured import read_trace
from penstock.planner_service.question.site import Site
from penstock.planner_service.simulator import Workload
from penstock.services.gguf import gguf_file, read_metadata
from penstock.services.mesh_schema.tiers import MeshTier
from tests.support.inputs import read_site

KV_TOKENS_EACH, MAX_STEP_TOKENS = 1024, 512  # of each worker (for each of its requests), the same for profile and mesh
JUDGED = "judged.csv"
UNREACHABLE = 3  # exit status of `penstock plan` if no plan meets the targets


@dataclass(frozen=True, slots=True)
class Layout:
    """Workers on the machine's cores. pinned: each worker has a core of its own, else they share all cores. max_running: of
    each worker."""

    name: str
    workers: int
    pinned: bool
    max_running: int = 32

    @property
    def kv_tokens(self) -> int:
        """Of each worker."""
        return KV_TOKENS_EACH * self.max_running


def layouts() -> tuple[Layout, Layout]:
    """Twice as many workers as cores over all cores, and as many with a core each."""
    cores = len(os.sched_getaffinity(0))
    return Layout("shared", 2 * cores, False), Layout("pinned", cores, True)


class CommandFailed(Exception):
    """A command of Penstock failed. status: its exit status."""

    def __init__(self, command: str, status: int, output: str) -> None:
        super().__init__(f"penstock {command} ended with status {status}: {output.strip()[-2000:]}")
        self.status = status


async def penstock(*arguments: object, core: int | None = None) -> str:
    """Run a command of Penstock; return its output. core: the only core that it may use.

    Raises:
        CommandFailed: Its exit status is not 0.
    """
    words = [str(argument) for argument in arguments]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "penstock.cli.main",
        *words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    if core is not None:
        os.sched_setaffinity(process.pid, {core})  # it has one thread yet; the others inherit this
    output, problems = await process.communicate()
    if process.returncode:
        raise CommandFailed(words[0], process.returncode, (problems or output).decode(errors="replace"))
    return output.decode()


async def profile(tiers: Sequence[MeshTier], layout: Layout, folder: Path) -> dict[str, float]:
    """Profile every tier under the conditions of its workers; return the mean errors of the fits by tier.

    As many profiles run at once as there will be workers, because workers with a core each share caches and memory, too. The
    first is used.
    """
    errors = {}
    cores = sorted(os.sched_getaffinity(0))
    for tier in tiers:
        outputs = await asyncio.gather(
            *(
                penstock(
                    *("profile", tier.model, "--out", profile_file(folder, tier.name, copy)),
                    *("--kv-tokens", layout.kv_tokens, "--max-running", layout.max_running),
                    *("--max-step-tokens", MAX_STEP_TOKENS),
                    *("--no-qoe", "--json"),
                    core=cores[copy % len(cores)] if layout.pinned else None,
                )
                for copy in range(layout.workers)
            )
        )
        errors[tier.name] = float(json.loads(outputs[0])["mean_error"])
    return errors


def profile_file(folder: Path, tier: str, copy: int = 0) -> Path:
    return folder / f"profile-{tier}{f'-{copy}' if copy else ''}.json"


def write_site(folder: Path, tiers: Sequence[MeshTier], layout: Layout, judge_s: float) -> Site:
    """Write the cluster and models files of `penstock plan`; return the site that they describe.

    A worker is a GPU of the planner. All tiers are measured, so the data sheet is not used.
    """
    sheet = {"name": "worker", "memory_gb": 64, "memory_gb_per_s": 10, "tflops": 0.1, "link_gb_per_s": 10}
    cluster = {"gpu": sheet, "nodes": 1, "gpus_per_node": layout.workers}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    entries = [
        {
            "name": tier.name,
            "model": _shape(Path(tier.model), tier.served_name),
            "profiles": [profile_file(folder, tier.name).name],
        }
        for tier in tiers
    ]
    engine = {"max_running": layout.max_running, "max_step_tokens": MAX_STEP_TOKENS}
    (folder / "models.yaml").write_text(yaml.safe_dump({"tiers": entries, "judge_s": judge_s, "engine": engine}))
    return read_site(folder / "cluster.yaml", folder / "models.yaml")


def _shape(model: Path, name: str) -> dict[str, Any]:
    if (file := gguf_file(model)) is not None:
        metadata, size = read_metadata(file), file.stat().st_size
        of = metadata["general.architecture"]
        layers, hidden = metadata[f"{of}.block_count"], metadata[f"{of}.embedding_length"]
        heads, kv_heads = metadata[f"{of}.attention.head_count"], metadata[f"{of}.attention.head_count_kv"]
        head_dim = metadata.get(f"{of}.attention.key_length")
    else:
        config = json.loads((model / "config.json").read_text())
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        heads = config["num_attention_heads"]
        kv_heads, head_dim = config.get("num_key_value_heads", heads), config.get("head_dim")
    return {
        "name": name,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "parameters": max(size / 2, 1.0) / 1e9,
    }


def split_trace(path: Path, folder: Path) -> tuple[Path, Workload]:
    """Write the first half of a trace for the planner; return (its file, the second half, which is replayed)."""
    trace = read_trace(path)
    half = len(trace) // 2
    file = folder / "trace.csv"
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(("arrival_s", "input_tokens", "output_tokens"))
        writer.writerows(
            zip(
                trace.arrival_s[:half].tolist(),
                trace.input_tokens[:half].tolist(),
                trace.output_tokens[:half].tolist(),
                strict=True,
            )
        )
    rest = Workload(trace.arrival_s[half:], trace.input_tokens[half:], trace.output_tokens[half:])
    return file, rest


async def plan(
    folder: Path, trace: Path, *, min_quality: float, slo_s: float, rate: float, seed: int, skip: bool
) -> dict[str, Any]:
    """The content of the plan file of `penstock plan` for a quality and an SLO; `targets` says with which.

    skip: with skip prediction. Where no plan meets both, the latency target is left out, then the quality is the
    expected one, as it is for the other systems, then the bound on the load is left out.
    """
    targets = {"min_quality": min_quality, "rate": rate, "goal": "latency", "seed": seed, "rules": {"skip": skip}}
    files = {"cluster": "cluster.yaml", "models": "models.yaml", "quality": JUDGED}
    attempts: list[dict[str, Any]] = [{"max_latency_s": slo_s}, {}, {"confidence": 0.5}]
    attempts.append({"confidence": 0.5, "allow_overload": True})
    for more in attempts:
        question = folder / "question.yaml"
        question.write_text(yaml.safe_dump(files | targets | more))
        try:
            text = await penstock("plan", "--question", question, "--trace", trace, "--json")
        except CommandFailed as error:
            if error.status != UNREACHABLE or more == attempts[-1]:
                raise
            continue
        figures: dict[str, Any] = json.loads(text)
        reached = ", ".join(f"{name} {value:.6g}" for name, value in {"min_quality": min_quality, **more}.items())
        return figures | {"targets": reached}
    raise AssertionError("the last attempt returns or raises")


def mesh_content(base: dict[str, Any], system: System, layout: Layout) -> dict[str, Any]:
    """A mesh file with the system's workers, thresholds and skip limits; the rest is that of the base file.

    A tier without workers is skipped, whatever its threshold.
    """
    last = len(base["tiers"]) - 1
    engine = {
        "kv_tokens": layout.kv_tokens,
        "max_running": layout.max_running,
        "max_queued": 4 * layout.max_running,
        "max_step_tokens": MAX_STEP_TOKENS,
    }
    tiers = []
    for i, tier in enumerate(base["tiers"]):
        entry = {key: value for key, value in tier.items() if key != "skip_below"} | engine
        entry["workers"] = system.workers[i]
        if i < last:
            entry["threshold"] = min(100.0, float(system.thresholds[i]))
            if system.skip_below and system.skip_below[i] is not None:
                entry["skip_below"] = system.skip_below[i]
        tiers.append(entry)
    router: dict[str, Any] = {"max_active": 4096, "max_waiting": 4096, "grpc_port": 0, "http_port": 0}
    if predictor := score_predictor(base):
        router["score_predictor"] = predictor
    judge = {"judge": base["judge"]} if base.get("judge") else {}
    return {"name": base.get("name", "penstock"), "tiers": tiers, "router": router, **judge}


def score_predictor(base: dict[str, Any]) -> str:
    """The score predictor that a mesh file names; empty without one."""
    return str(base.get("router", {}).get("score_predictor", ""))
