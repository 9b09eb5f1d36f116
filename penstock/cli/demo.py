"""`penstock demo`: run the shipped models on held-out prompts and report accuracy and latency."""

import asyncio
import json as json_module
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.cli import options, targets
from penstock.cli.extras import needs_extra
from penstock.cli.local import MeshFileOption, started
from penstock.cli.output import console, errors, fail, print_json, seconds
from penstock.client.aio import AsyncClient
from penstock.client.types import Reply


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out prompt and its answer."""

    prompt: str
    answer: str
    task: str
    level: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The reply of one model to one question."""

    question: Question
    reply: Reply
    latency_s: float

    @property
    def correct(self) -> bool:
        return final_answer(self.reply.text) == self.question.answer


def final_answer(text: str) -> str:
    """The text after the last `Answer:`, or all of it without one; stripped."""
    return text.rsplit("Answer:", 1)[-1].strip()


@needs_extra("demo", "mesh")
def demo(
    mesh: MeshFileOption = Path("mesh.yaml"),
    prompts: Annotated[
        int, options.number("--prompts", help="Held-out prompts to send.", least=1, most=options.MAX_COUNT)
    ] = 100,
    concurrency: Annotated[
        int, options.number("--concurrency", help="Prompts in flight.", least=1, most=options.MAX_CONCURRENCY)
    ] = 16,
    questions: Annotated[Path, typer.Option("--questions", help="Held-out prompts with their answers.")] = Path(
        "models/heldout.jsonl"
    ),
    out: Annotated[Path, options.new_file("--out", help="The JSON file to write.")] = Path("demo.json"),
    folder: targets.Folder = Path(".penstock/demo"),
    json: targets.Json = False,
) -> None:
    """Start a mesh, send held-out prompts to each tier and to the cascade, show the results, and stop the mesh.

    Accuracy is measured against the known answers. None of the prompts was in the training data.
    """
    from penstock.local import MeshOptions

    held_out = read_questions(questions, prompts)
    mesh_options = MeshOptions(mesh, folder, any_ports=True)
    figures = asyncio.run(_run(mesh_options, held_out, concurrency, quiet=json))
    out.write_text(json_module.dumps(figures, indent=2) + "\n")
    if json:
        print_json(figures)
    else:
        _show(figures, out)


def read_questions(path: Path, count: int) -> list[Question]:
    """The first `count` questions of a JSONL file. The command ends with an error if it has fewer."""
    try:
        rows = [json_module.loads(line) for line in path.read_text().splitlines()]
        held_out = [Question(row["prompt"], row["answer"], row["task"], row["level"]) for row in rows[:count]]
    except (OSError, ValueError, KeyError) as error:
        fail(f"{path}: {error!r}")
    if len(held_out) < count:
        fail(f"{path} has {len(held_out)} prompts, fewer than {count}")
    return held_out


async def _run(mesh_options: Any, held_out: Sequence[Question], concurrency: int, *, quiet: bool) -> dict[str, Any]:
    async with started(mesh_options, quiet=quiet) as mesh:
        assert mesh is not None
        tiers = [tier.name for tier in mesh.mesh.tiers]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=errors if quiet else console, disable=quiet) as progress:
            async with AsyncClient(mesh.grpc_addresses) as client:
                runs = {}
                for model in (*tiers, "cascade"):
                    bar = progress.add_task(model.ljust(8), total=len(held_out))
                    runs[model] = await _ask_all(client, model, held_out, concurrency, partial(progress.advance, bar))
    return figures_of(tiers, runs, concurrency)


async def _ask_all(
    client: AsyncClient, model: str, held_out: Sequence[Question], concurrency: int, on_reply: Callable[[], object]
) -> tuple[list[Outcome], float]:
    """(outcomes, total seconds)."""
    slots = asyncio.Semaphore(concurrency)

    async def one(question: Question) -> Outcome:
        async with slots:
            began = time.monotonic()
            reply = await client.generate(question.prompt, model=model, temperature=0.0)
            on_reply()
            return Outcome(question, reply, time.monotonic() - began)

    began = time.monotonic()
    outcomes = await asyncio.gather(*map(one, held_out))
    return list(outcomes), time.monotonic() - began


def figures_of(tiers: Sequence[str], runs: dict[str, tuple[list[Outcome], float]], concurrency: int) -> dict[str, Any]:
    """The content of demo.json."""
    cascade, took_s = runs["cascade"]
    answered = Counter(outcome.reply.tier for outcome in cascade)
    ttft = sorted(outcome.reply.ttft_s or 0.0 for outcome in cascade)
    tokens = sum(outcome.reply.usage.output_tokens for outcome in cascade)
    by_tier = []
    for name in tiers:
        alone, alone_s = runs[name]
        by_tier.append(
            {
                "name": name,
                "accuracy": _accuracy(alone),
                "mean_latency_s": statistics.mean(o.latency_s for o in alone),
                "tokens_per_s": sum(o.reply.usage.output_tokens for o in alone) / alone_s,
                "share_answered": answered[name] / len(cascade),
                "accuracy_where_answered": _accuracy([o for o in cascade if o.reply.tier == name]),
            }
        )
    return {
        "prompts": len(cascade),
        "concurrency": concurrency,
        "tiers": by_tier,
        "cascade": {
            "accuracy": _accuracy(cascade),
            "mean_latency_s": statistics.mean(o.latency_s for o in cascade),
            "ttft_p50_s": _percentile(ttft, 0.5),
            "ttft_p95_s": _percentile(ttft, 0.95),
            "tokens_per_s": tokens / took_s,
        },
        "requests": [
            {
                "task": o.question.task,
                "level": o.question.level,
                "prompt": o.question.prompt,
                "expected": o.question.answer,
                "answer": final_answer(o.reply.text),
                "correct": o.correct,
                "tier": o.reply.tier,
                "latency_s": o.latency_s,
                "scores": {t.tier: t.score for t in o.reply.tiers if t.score is not None},
            }
            for o in cascade
        ],
    }


def _accuracy(outcomes: Sequence[Outcome]) -> float | None:
    return sum(o.correct for o in outcomes) / len(outcomes) if outcomes else None


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _show(figures: dict[str, Any], out: Path) -> None:
    table = Table(title=f"{figures['prompts']} held-out prompts, {figures['concurrency']} concurrent")
    for name in ("", "accuracy", "mean latency", "tokens/s", "share of cascade answers", "accuracy of these"):
        table.add_column(name, justify="left" if not name else "right")
    for tier in figures["tiers"]:
        accuracy = tier["accuracy_where_answered"]
        table.add_row(
            f"{tier['name']} alone",
            f"{tier['accuracy']:.0%}",
            seconds(tier["mean_latency_s"]),
            f"{tier['tokens_per_s']:.0f}",
            f"{tier['share_answered']:.0%}",
            "-" if accuracy is None else f"{accuracy:.0%}",
        )
    cascade = figures["cascade"]
    table.add_section()
    table.add_row(
        "[bold]cascade[/]",
        f"[bold]{cascade['accuracy']:.0%}[/]",
        f"[bold]{seconds(cascade['mean_latency_s'])}[/]",
        f"[bold]{cascade['tokens_per_s']:.0f}[/]",
        "",
        "",
    )
    console.print(table)
    console.print(
        f"First token of the cascade: {seconds(cascade['ttft_p50_s'])} at the median, "
        f"{seconds(cascade['ttft_p95_s'])} at p95. Some of its requests:"
    )
    sample = Table(box=None, header_style="dim")
    for name in ("prompt", "answer", "tier", "scores of lower tiers"):
        sample.add_column(name, overflow="ellipsis", no_wrap=True)
    for request in figures["requests"][:8]:
        scores = ", ".join(f"{tier} {score:.0f}" for tier, score in request["scores"].items())
        mark = "[green]✓[/] " if request["correct"] else "[red]✗[/] "
        sample.add_row(request["prompt"][:48], mark + request["answer"][:28], request["tier"], scores)
    console.print(sample)
    console.print(f"All figures: {out}")
