"""The benchmark's way through layouts, quality targets, rates, rounds and systems."""

import asyncio
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.end_to_end import explained, figures, prompts, site, systems
from benchmarks.end_to_end.figures import Row, Scores
from benchmarks.end_to_end.meshes import ServedSystem, serving
from benchmarks.end_to_end.site import Layout
from benchmarks.end_to_end.systems import System
from benchmarks.meshes import absolute_paths
from benchmarks.public_data import public
from penstock.cli.demo_run import pace_of
from penstock.cli.held_out import Question, read_questions
from penstock.cli.replay import replay
from penstock.client.judging import Answered
from penstock.client.types import Options
from penstock.planner_service.files.measured import read_trace
from penstock.planner_service.question.demand import demand_of, stretch_of
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.simulator import Workload
from penstock.services.mesh_file import load_mesh_file, read_mesh_data
from penstock.services.mesh_schema.mesh import MeshFile
from tests.support.inputs import read_quality

TRACE = "traces/azure2023_conv.csv.gz"
SLO_TIMES = 5.0  # the SLO: so many times what the largest model takes for a request without others
BATCHES = 3  # full ones that show what the largest model sustains
PLANNED_REQUESTS = 500
JUDGED_FOR_COST = 16  # answers, scored one by one, whose time is the planner's `judge_s`
REQUEST_TIMEOUT_S = 600.0
LEAST_REQUESTS = 20  # of a run


@dataclass(frozen=True, slots=True)
class Setup:
    """What is measured.

    loads: shares of what the largest model alone sustains on all workers. below_largest: quality targets, in points of
    accuracy below the largest model's, or of the judge's score where not all right answers are known. questions: a file of
    prompts, of which `measured` are judged for the planner and the others replayed; without one, so many prompts more are
    drawn for the shipped family. lone: prompts that show what the largest model takes for a request without others.
    in_order: the first of the file are those that are judged; else they are drawn. max_tokens: of a reply. scorer: of the
    replayed answers; see `Scores`. compared: names of systems.
    """

    mesh_file: Path
    questions: Path | int
    layouts: tuple[Layout, ...]
    loads: tuple[float, ...]
    below_largest: tuple[float, ...]
    rounds: int
    run_s: float
    measured: int
    seed: int = 1
    lone: int = 20
    in_order: bool = False
    max_tokens: int | None = None
    scorer: str = ""
    compared: tuple[str, ...] = ("largest", "load_based", "random", "plan")


class EndToEnd:
    """One run of the benchmark. Files of the planner are in `folder`."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self._setup, self._folder = setup, folder
        load_mesh_file(setup.mesh_file)  # names what is wrong with it
        self._base = absolute_paths(read_mesh_data(setup.mesh_file), setup.mesh_file.resolve().parent)
        self._mesh = MeshFile.model_validate(self._base)
        self._predictor = site.score_predictor(self._base)
        self._measured, self._replayed = _questions(setup)
        self._plan_trace, self._trace = site.split_trace(public(TRACE), folder)
        self._scores = Scores(setup.scorer)
        self._judge_s = 0.0
        self._seeds = [setup.seed + 1 + number for number in range(setup.rounds)]  # of the rounds

    async def run(self, write: Callable[[Row], None]) -> None:
        """Measure everything. write: called with all results so far after every cell."""
        setup = self._setup
        await self._judge_sample()
        judged = read_quality(self._folder / site.JUDGED, tuple(tier.name for tier in self._mesh.tiers))
        result: Row = {
            "setup": {
                **asdict(setup),
                "mesh_file": str(setup.mesh_file),
                "questions": str(setup.questions),
                "replayed": len(self._replayed),
            },
            "trace": TRACE,
            "slo_times": SLO_TIMES,
            "judge_s": self._judge_s,
            "judged": {
                tier: {
                    "mean_quality": float(quality),
                    "mean_score": float(score),
                    "mean_output_tokens": float(tokens),
                }
                for tier, quality, score, tokens in zip(
                    judged.tiers,
                    judged.quality.mean(axis=0),
                    judged.scores.mean(axis=0),
                    judged.output_tokens.mean(axis=0),
                    strict=True,
                )
            },
            "layouts": {},
            "cells": [],
        }
        sites = {}
        for layout in setup.layouts:
            sites[layout.name], result["layouts"][layout.name] = await self._prepared(layout)
        for below in setup.below_largest:
            min_quality = max(judged.worst, judged.best - below)
            for layout in setup.layouts:
                for load in setup.loads:
                    where, about = sites[layout.name], result["layouts"][layout.name]
                    cell = await self._cell(layout, where, about, min_quality, load)
                    result["cells"].append({"quality_below_largest": below, **cell})
                    result["sustained"] = figures.sustained(result["cells"])
                    write(result)

    async def _judge_sample(self) -> None:
        """`penstock measure` on a mesh of one worker per tier; and the time that judging an answer takes."""
        prompts = self._folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps(_row(question)) + "\n" for question in self._measured))
        tiers = len(self._mesh.tiers)
        everything = System("all", (1,) * tiers, (50.0,) * (tiers - 1))
        layout = Layout("measure", tiers, False)
        async with serving(everything, layout, self._base, self._measured, self._setup.max_tokens) as served:
            mesh = served.mesh
            addresses = ("--target", ",".join(mesh.addresses.grpc), "--admin", ",".join(mesh.addresses.admin))
            file = self._folder / site.JUDGED
            limit = ("--max-tokens", most) if (most := self._setup.max_tokens) else ()
            await site.penstock("measure", prompts, "--out", file, *limit, *addresses, "--json")
            if self._predictor:
                await site.penstock(
                    "predictor", prompts, file, "--from", self._predictor, "--quality-out", file, "--json"
                )
            first = Options(model=self._mesh.tiers[0].name, temperature=0.0, max_tokens=most, top_logprobs=0)
            answers = [
                Answered(q.prompt, await served.client.generate(q.prompt, first), q.answer)
                for q in self._measured[:JUDGED_FOR_COST]
            ]
            loop = asyncio.get_running_loop()
            async with served.judge() as judge:
                began_s = loop.time()
                for answer in answers:
                    await judge.score([answer])
                self._judge_s = (loop.time() - began_s) / len(answers)
        print(f"judged {len(self._measured)} prompts; {1000 * self._judge_s:.1f} ms per answer", flush=True)

    async def _prepared(self, layout: Layout) -> tuple[Site, Row]:
        """Profile the tiers and measure what the largest model sustains alone."""
        folder = self._folder / layout.name
        folder.mkdir()
        shutil.copy(self._folder / site.JUDGED, folder)
        fit_errors = await site.profile(self._mesh.tiers, layout, folder)
        where = site.write_site(folder, self._mesh.tiers, layout, self._judge_s)
        alone = systems.largest(len(self._mesh.tiers), layout.workers)
        async with serving(alone, layout, self._base, self._measured, self._setup.max_tokens) as served:
            in_flight, lone = layout.max_running * layout.workers, self._setup.lone
            questions = _drawn(self._measured, lone + BATCHES * in_flight, self._setup.seed)
            tier, most = self._mesh.tiers[-1].name, self._setup.max_tokens
            pace = await pace_of(served.client, tier, questions, in_flight, lone, most)
        about = {
            "workers": layout.workers,
            "pinned": layout.pinned,
            "profile_fit_error": fit_errors,
            "engine_s_per_request": self._engine_seconds(where),
            "lone_s": pace.lone_s,
            "largest_sustains_per_s": pace.sustained_per_s,
            "slo_s": SLO_TIMES * pace.lone_s,
        }
        print(
            f"{layout.name}: {layout.workers} workers, the largest model sustains {pace.sustained_per_s:.1f}/s, "
            f"SLO {about['slo_s']:.2f} s",
            flush=True,
        )
        return where, about

    def _engine_seconds(self, where: Site) -> dict[str, float]:
        costs = systems.engine_seconds(where, read_quality(self._folder / site.JUDGED, where.tiers))
        return dict(zip(where.tiers, costs, strict=True))

    async def _cell(self, layout: Layout, where: Site, about: Row, min_quality: float, load: float) -> Row:
        """All systems at one rate and quality target: tuned, started, run in turns."""
        slo_s = about["slo_s"]
        rate = load * about["largest_sustains_per_s"]
        chosen, targets = await self._tuned(layout, where, min_quality, slo_s, rate)
        count = max(LEAST_REQUESTS, round(rate * self._setup.run_s))
        parts = [prompts.part(self._replayed, count, number) for number in range(len(self._seeds))]
        rows: dict[str, list[Row]] = {system.name: [] for system in chosen}
        works = [stretch_of(self._trace, count, seed, rate) for seed in self._seeds]
        idle = {}
        async with AsyncExitStack() as stack:
            served = [
                await stack.enter_async_context(
                    serving(system, layout, self._base, self._measured, self._setup.max_tokens)
                )
                for system in chosen
            ]
            for number, (seed, work) in enumerate(zip(self._seeds, works, strict=True)):
                for one in random.Random(seed).sample(served, len(served)):
                    name = one.system.name
                    row = await self._turn(one, where, work, parts[number], seed, rate, slo_s)
                    rows[name].append(row)
                    idle[name] = one.idle_cores
                    print(_line(layout.name, min_quality, load, number, name, row), flush=True)
        judged = self._demand(where, rate).judged

        def forecasts(system: System) -> list[systems.Forecast]:
            return [
                systems.forecast(where, judged, work.arrival_s, system, slo_s, seed)
                for seed, work in zip(self._seeds, works, strict=True)
            ]

        def corrected(system: System) -> list[systems.Forecast]:
            """Of all rounds but the first, with the step times of the round before; empty where these are unknown."""
            before = [row["explained"] for row in rows[system.name][:-1]]
            if not all(before):
                return []
            return [
                systems.forecast(
                    explained.slower(where, why["step_factors"]), judged, work.arrival_s, system, slo_s, seed
                )
                for why, seed, work in zip(before, self._seeds[1:], works[1:], strict=True)
            ]

        return {
            "layout": layout.name,
            "min_quality": min_quality,
            "load": load,
            "rate_per_s": rate,
            "slo_s": slo_s,
            "requests_per_run": count,
            "plan_targets": targets,
            "systems": {
                system.name: {
                    "workers": system.workers,
                    "thresholds": [None if h > 100 else h for h in system.thresholds],
                    "shares": system.shares,
                    "skip_below": system.skip_below,
                    "idle_cores": idle[system.name],
                    **figures.system_summary(rows[system.name], forecasts(system), corrected(system)),
                    "rounds": rows[system.name],
                }
                for system in chosen
            },
            "plan_against": figures.comparisons(rows),
        }

    async def _tuned(
        self, layout: Layout, where: Site, min_quality: float, slo_s: float, rate: float
    ) -> tuple[list[System], str]:
        """(the systems, the targets with which the plan was made)."""
        seed, demand = self._setup.seed, self._demand(where, rate)
        plan = await site.plan(
            self._folder / layout.name,
            self._plan_trace,
            min_quality=min_quality,
            slo_s=slo_s,
            rate=rate,
            seed=seed,
            skip=bool(self._predictor),
        )
        ours = systems.of_plan(plan)
        cost_s = systems.engine_s(where, demand.judged, ours)
        known: dict[str, Callable[[], System]] = {
            "largest": lambda: systems.largest(len(where.tiers), layout.workers),
            "load_based": lambda: systems.load_based(where, demand, min_quality, seed),
            "random": lambda: systems.random_router(where, demand, cost_s, layout.workers, seed),
            "plan": lambda: ours,
        }
        return [tune() for name, tune in known.items() if name in self._setup.compared], plan["targets"]

    def _demand(self, where: Site, rate: float) -> Demand:
        """What baselines are tuned to: the same trace and judged sample that the plan is made from."""
        judged = read_quality(self._folder / site.JUDGED, where.tiers)
        trace = read_trace(self._plan_trace)
        count = min(PLANNED_REQUESTS, len(trace))
        return demand_of(trace, judged, requests=count, seed=self._setup.seed, lengths="quality", rate=rate)

    async def _turn(
        self,
        one: ServedSystem,
        where: Site,
        work: Workload,
        questions: Sequence[Question],
        seed: int,
        rate: float,
        slo_s: float,
    ) -> Row:
        """One run of one system."""
        arrival_s = work.arrival_s.tolist()
        models = one.system.models([tier.name for tier in self._mesh.tiers], len(work), seed)
        restarts, before = one.restarts, one.thread_times()
        how = (one.client, questions, models, arrival_s, one.cpu_s)
        run = await replay(*how, timeout_s=REQUEST_TIMEOUT_S, max_tokens=self._setup.max_tokens)
        engines = one.engine_times_since(before)
        why = explained.explained(where, run, arrival_s, one.system, engines) if engines else None
        async with one.judge() as judge:
            scores = await self._scores.of(run, judge)
        return {
            **figures.run_figures(run, scores, rate, slo_s),
            "seed": seed,
            "restarts": one.restarts - restarts,
            "explained": asdict(why) if why else None,
        }


def _questions(setup: Setup) -> tuple[list[Question], list[Question]]:
    """(prompts to judge, prompts to replay)."""
    if isinstance(setup.questions, int):
        questions = prompts.of_shipped_family(setup.measured + setup.questions, setup.seed)
    else:
        questions = read_questions(setup.questions, setup.measured + LEAST_REQUESTS)
    drawn = questions if setup.in_order else random.Random(setup.seed).sample(questions, len(questions))
    return drawn[: setup.measured], drawn[setup.measured :]


def _drawn(questions: Sequence[Question], count: int, seed: int) -> list[Question]:
    """Questions in an order drawn by `seed`, each once before any comes again."""
    draw, result = random.Random(seed), list[Question]()
    while len(result) < count:
        result += draw.sample(questions, len(questions))
    return result[:count]


def _row(question: Question) -> dict[str, Any]:
    prompt = {"prompt": question.prompt} if isinstance(question.prompt, str) else {"messages": question.prompt}
    return {**prompt, "answer": question.answer}


def _line(layout: str, min_quality: float, load: float, number: int, name: str, row: Row) -> str:
    return (
        f"{layout} quality {min_quality:.1f} load {load:.2f} round {number + 1} {name:<11} right {row['accuracy']:.1%} "
        f"goodput {row['goodput_per_s']:.2f}/s p95 {row['latency_p95_s'] or 0:.2f} s "
        f"CPU {1000 * (row['cpu_s_per_answer'] or 0):.0f} ms failed {row['failed']}"
    )


def measure(setup: Setup, write: Callable[[Row], None]) -> None:
    """Run the benchmark in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        asyncio.run(EndToEnd(setup, Path(name)).run(write))
