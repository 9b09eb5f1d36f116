"""The mesh on one machine: started, watched, restarted and stopped, as real processes."""

import asyncio
import dataclasses
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import penstock.planner_service.stages.replay as stage_replay
from penstock import AsyncClient, AsyncPlannerClient
from penstock.local.mesh import LocalMesh
from penstock.local.runfile import METRICS_NAME, read_run_file
from penstock.placement.mesh import MeshFailed
from penstock.placement.mesh_input import MeshOptions
from penstock.planner_service.files.profiles import Profile, write_profile
from penstock.planner_service.simulator import EngineLimits, Replica
from penstock.services import background
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.instances import Role
from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.services.domain.workload import RequestRecord, TierVisit, Window
from penstock.services.processes import ProcessSpec, Watched, Watcher, free_port
from penstock.services.state.connection import connect
from penstock.services.state.keys import Keys
from penstock.services.state.workload import WorkloadStore
from penstock.types.plans import Plan, QoeModel
from tests.conftest import FAST, ROOT, write_mesh_file
from tests.support.cli import penstock, penstock_process
from tests.support.measured import metrics_page
from tests.support.present import present
from tests.support.questions import replan_question
from tests.support.tables import write_trace
from tests.support.waiting import runs, until, until_now


def simulated_mesh(folder: Path, **parts: Any) -> Path:
    tiers: list[dict[str, Any]] = [{"name": "small", "model": "s", "threshold": 80}, {"name": "large", "model": "l"}]
    return write_mesh_file(folder, **{"tiers": tiers} | parts)


def workers(mesh: LocalMesh) -> dict[str, int]:
    """Those that are registered, by tier."""
    found = [i.model.tier for i in mesh.view.instances(Role.WORKER) if i.model is not None]
    return {tier: found.count(tier) for tier in ("small", "large")}


def sleeper(folder: Path, code: str, stop_s: float = 5.0) -> ProcessSpec:
    return ProcessSpec("sleeper", [sys.executable, "-c", code], {}, folder / "sleeper.log", 1, stop_s)


def test_no_two_processes_are_given_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port is reserved before anybody listens on it, also against other processes. No mesh takes one of this range."""
    monkeypatch.setattr("penstock.services.processes._PORTS", range(19_990, 19_996))
    code = "from penstock.services import processes as p; p._PORTS = range(19_990, 19_996)"
    code += "; print(p.free_port(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as other:
        taken = int(present(other.stdout).readline())
        mine = {free_port() for _ in range(4)}
        other.communicate("\n")
    assert len(mine) == 4
    assert taken not in mine


async def test_who_ignores_the_request_to_end_is_killed(tmp_path: Path) -> None:
    watcher = Watcher()
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    entry = await watcher.start(sleeper(tmp_path, code, stop_s=0.2))
    await until(lambda: "ready" in entry.log_tail())
    pid = entry.pid
    await watcher.stop_all()
    assert not runs(present(pid))


async def test_unusable_settings_are_not_tried_again(tmp_path: Path) -> None:
    watcher = Watcher()
    entry = await watcher.start(sleeper(tmp_path, "import sys; print('no such model'); sys.exit(2)"))
    async with asyncio.timeout(60):
        await entry.fatal.wait()
    assert "no such model" in entry.log_tail()
    assert entry.restarts == 0
    await watcher.stop_all()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A mesh started with `penstock up --detach`; the folder it runs from."""
    folder = tmp_path_factory.mktemp("up")
    up = penstock_process(
        "up",
        "--mesh",
        str(simulated_mesh(folder)),
        "--folder",
        str(folder),
        "--worker",
        "small=2",
        "--detach",
        "--json",
    )
    assert up.returncode == 0, up.stderr
    assert json.loads(up.stdout)["grpc"]
    yield folder
    found = read_run_file(folder)
    if found is not None:
        penstock_process("down", "--folder", str(folder))


def target(folder: Path) -> str:
    return present(read_run_file(folder)).grpc[0]


def admin(folder: Path) -> str:
    return present(read_run_file(folder)).admin[0]


def test_status_and_top_show_the_mesh(running: Path) -> None:
    data = json.loads(penstock("status", "--admin", admin(running), "--json").stdout)
    assert [t["name"] for t in data["tiers"]] == ["small", "large"]
    assert sum(i["role"] == "worker" for i in data["instances"]) == 3
    said = penstock("status", "--admin", admin(running)).stdout
    assert "small" in said
    assert "connected" in said
    shown = penstock("top", "-a", admin(running), "-n", "1").stdout
    assert "connected" in shown
    assert shown.endswith("\n")
    lines = penstock("top", "-a", admin(running), "--json", "-n", "2", "-i", "0.1").stdout.splitlines()
    assert [json.loads(line)["status"]["plan_revision"] for line in lines] == [1, 1]


def test_ask_shows_the_cascade_and_the_answer(running: Path) -> None:
    data = json.loads(penstock("ask", "hello", "-t", target(running), "--json").stdout)
    assert data["tier"] == "small"
    said = penstock("ask", "hello", "-t", target(running)).stdout
    assert data["text"].strip() in said
    assert "threshold" in said
    quiet = penstock("ask", "hello", "-q", "-t", target(running)).stdout
    assert quiet.rstrip("\n") == data["text"].rstrip("\n")


def test_chat_goes_turn_by_turn(running: Path) -> None:
    said = penstock("chat", "-t", target(running), text="hello\nand more\n\n").stdout
    assert said.count("you") >= 2
    assert said.count("trace ") == 2


def test_trace_shows_a_tree(running: Path) -> None:
    trace_id = json.loads(penstock("ask", "hello", "-t", target(running), "--json").stdout)["trace_id"]

    def is_complete() -> bool:
        said = penstock("trace", trace_id, "-a", admin(running)).stdout
        return all(name in said for name in ("WorkerService/Generate", "JudgeService/Score", "tier small"))

    until_now(is_complete)
    data = json.loads(penstock("trace", "-n", "1", "-a", admin(running), "--json").stdout)
    assert len(data) == 1
    assert penstock("trace", "0" * 32, "-a", admin(running)).returncode == 1


def test_the_plan_is_shown_and_changed(running: Path) -> None:
    before = json.loads(penstock("plan", "show", "-a", admin(running), "--json").stdout)
    said = penstock("plan", "set", "--threshold", "small=95", "--note", "test", "-a", admin(running), "--json")
    after = json.loads(said.stdout)
    assert after["revision"] == before["revision"] + 1
    assert after["tiers"][0]["threshold"] == 95
    assert "stricter" not in said.stdout
    until_now(lambda: json.loads(penstock("ask", "hello", "-t", target(running), "--json").stdout)["tier"] == "large")
    for bad, said_of_it in (("small", "TIER=SCORE"), ("huge=3", "no tier huge"), ("small=300", "threshold")):
        failed = penstock("plan", "set", "--threshold", bad, "-a", admin(running))
        assert failed.returncode == 2
        assert said_of_it in failed.stderr
    failed = penstock("plan", "set", "--instances", "small=1000", "-a", admin(running))
    assert failed.returncode == 2
    assert "plan.tiers[0].instances: must be at most 64" in " ".join(failed.stderr.split())
    assert penstock("plan", "set", "--threshold", "small=80", "-a", admin(running)).returncode == 0
    pages = json.loads((running / METRICS_NAME).read_text())
    (page,) = (page for page in pages if page["labels"]["instance"].startswith("planner"))
    text = metrics_page(page["targets"][0])
    desired = re.findall(r'^penstock_desired_replicas.*penstock_tier="(\w+)".* (\S+)$', text, re.MULTILINE)
    assert desired == [("small", "2.0"), ("large", "1.0")]  # what autoscalers follow, with the counts of --worker


@pytest.mark.slow
def test_a_stage_layout_is_published_for_a_tier(running: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of replicas where short requests pay for long ones in their batch, so that the replay favours stages."""
    monkeypatch.setattr(stage_replay, "SUSTAINED_REQUESTS", (400, 800))
    latency = StepLatencyModel((0.0, 1.0), (0.005, 0.00501), 1e-7, 0.0, gap_s=5e-7)
    replica = Replica(ReplicaShape(1, 1), latency, 60_000, EngineLimits(64, 512, 16))
    qoe = QoeModel(0.005, 1e-5, 1e-8, 0.0, 2e-7)
    measured = Profile(
        "large", "torch", "here", replica, ((StepLoad(1, 1), 0.1),), 0.0, qoe=qoe, kv_bytes_per_token=1e5
    )
    profile, trace, out = tmp_path / "profile.json", tmp_path / "trace.csv", tmp_path / "stages.json"
    write_profile(profile, measured)
    random = Random(1)
    rows, at_s = [], 0.0
    for _ in range(300):  # one prompt in ten is long
        tokens = random.randint(3000, 5000) if random.random() < 0.1 else random.randint(20, 200)
        rows.append((at_s, tokens, random.randint(50, 250)))
        at_s += random.expovariate(7.0)
    write_trace(trace, rows)
    assert penstock("plan", "set", "--instances", "large=2", "-a", admin(running)).returncode == 0
    held = json.loads(penstock("plan", "show", "-a", admin(running), "--json").stdout)
    count = held["tiers"][1]["instances"]
    command = ["stages", "--trace", trace, "--profile", profile, "--bandwidth", 1000, "--out", out, "--no-plot"]
    command += ["-a", admin(running)]
    done = penstock(*command, "--instances", count, "--apply", "large", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(penstock("plan", "show", "-a", admin(running), "--json").stdout)
    assert (plan["revision"], plan["source"]) == (json.loads(done.stdout)["revision"], "stages")
    assert plan["tiers"][1]["stages"] == json.loads(out.read_text())["stages"]
    assert len(plan["tiers"][1]["stages"]) == 2
    assert len(plan["tiers"][1]["qoe"]) == 5
    assert plan["tiers"][0] == held["tiers"][0]
    failed = penstock(*command, "--instances", count + 1, "--apply", "large")
    assert (failed.returncode, "--instances" in failed.stderr) == (2, True)
    failed = penstock(*command, "--instances", count, "--apply", "huge")
    assert (failed.returncode, "no tier huge" in failed.stderr) == (2, True)
    write_trace(trace, ((i / 4, 100 + i % 7, 40 + i % 11) for i in range(200)))  # all alike: stages do not help
    failed = penstock(*command, "--instances", count, "--apply", "large")
    assert failed.returncode == 1
    assert "not published. Keep one stage" in " ".join(failed.stderr.split())
    assert json.loads(penstock("plan", "show", "-a", admin(running), "--json").stdout) == plan


@pytest.mark.slow
def test_errors_are_one_line_that_says_what_to_do(running: Path) -> None:
    failed = penstock("ask", "hello", "--temperature", "9", "-t", target(running))
    assert failed.returncode == 2
    assert "sampling.temperature" in failed.stderr
    failed = penstock("ask", "hello", "-t", "127.0.0.1:9")
    assert failed.returncode == 1
    assert "penstock up" in failed.stderr
    again = penstock_process("up", "--mesh", str(simulated_mesh(running)), "--folder", str(running))
    assert again.returncode == 1
    assert "penstock down" in again.stderr
    for refused in (again, penstock_process("up", "--mesh", "nowhere.yaml", "--folder", str(running / "other"))):
        assert "Traceback" not in refused.stderr


def test_down_stops_everything(running: Path) -> None:
    found = present(read_run_file(running))
    children = subprocess.run(
        ["pgrep", "-P", str(found.pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    assert len(children) >= 6  # redis, planner, judge, router, three workers
    down = penstock_process("down", "--folder", str(running))
    assert down.returncode == 0, down.stderr
    assert not any(runs(int(pid)) for pid in (str(found.pid), *children))
    assert read_run_file(running) is None
    assert penstock("down", "--folder", str(running)).returncode == 1


@pytest.mark.slow
async def test_the_plan_moves_workers_between_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new plan's counts are followed, new workers first, and no request is dropped on the way.

    The task that follows it is started again when it fails, and goes on where it was.
    """
    failures = background.failures["follow-plan"]
    pace = FAST | {"overhead_ms": 10.0}  # so that those who ask leave room to those who start
    two = ("small", "large")
    mesh_tiers: list[dict[str, Any]] = [{"name": n, "model": n, "engine": "simulated", "simulated": pace} for n in two]
    mesh_tiers[0] |= {"threshold": 80}
    async with LocalMesh(MeshOptions(simulated_mesh(tmp_path, tiers=mesh_tiers), tmp_path)) as mesh:

        async def fails_once(spec: ProcessSpec) -> Watched:
            monkeypatch.undo()
            raise OSError("no more processes")

        monkeypatch.setattr(mesh.watcher, "start", fails_once)

        async def reached(wanted: dict[str, int]) -> None:
            await until(lambda: workers(mesh) == wanted and len(mesh.watcher.watched) == 4 + sum(wanted.values()))

        assert workers(mesh) == {"small": 1, "large": 1}
        planner = mesh.addresses.planner
        async with (
            AsyncClient(mesh.addresses.grpc, admin=mesh.addresses.admin) as client,
            AsyncPlannerClient(planner) as plans,
        ):
            stop = asyncio.Event()

            async def ask() -> int:
                answered = 0
                while not stop.is_set():
                    reply = await client.generate("hello", temperature=0)
                    assert reply.text
                    answered += 1
                return answered

            asking = [asyncio.create_task(ask()) for _ in range(4)]
            for wanted in ({"small": 1, "large": 3}, {"small": 2, "large": 1}):
                plan = await plans.get_plan()
                tiers = tuple(dataclasses.replace(t, instances=wanted[t.name]) for t in plan.tiers)
                await plans.set_plan(dataclasses.replace(plan, tiers=tiers))
                await reached(wanted)
            stop.set()
            assert min(await asyncio.gather(*asking)) > 0
        assert background.failures["follow-plan"] == failures + 1
        names = {name for name in mesh.watcher.watched if name.startswith("worker")}
        assert names == {"worker-small-0", "worker-small-1", "worker-large-0"}


@pytest.mark.slow
async def test_the_mesh_moves_over_when_its_workload_drifts(tmp_path: Path) -> None:
    """Harder prompts: the planner sees it in sampled requests, plans again by itself, and workers move to the large tier."""
    replan_question(tmp_path, min_quality=80, requests=100)
    replan = {"enabled": True, "question": "question.yaml", "window_s": 0.25}
    file = simulated_mesh(tmp_path, planner={"replan": replan})

    def window(start_s: float, score: float) -> Window:
        scores = [min(100.0, max(0.0, score + (i * 37) % 41 - 20)) for i in range(50)]
        records = [
            RequestRecord(start_s, 400 + 10 * (i % 7), (TierVisit("small", 200 + 9 * (i % 11), scored),))
            for i, scored in enumerate(scores)
        ]
        return Window(start_s, 0.25, (1,) * 10, tuple(records))

    async with LocalMesh(MeshOptions(file, tmp_path)) as mesh:
        redis = connect(mesh.redis_url_of("router"))
        store = WorkloadStore(redis, Keys(mesh.mesh.name))

        async def followed(revision: int) -> Plan:
            await until(lambda: (plan := held()).revision >= revision and plan_counts(plan) == workers(mesh))
            return held()

        def held() -> Plan:
            return present(mesh.view.plan)

        def plan_counts(plan: Plan) -> dict[str, int]:
            return {tier.name: tier.instances for tier in plan.tiers}

        try:
            async with AsyncClient(mesh.addresses.grpc, admin=mesh.addresses.admin) as client:
                at = time.time()
                for i, score in enumerate((85, 85, 85, 45, 45)):
                    await store.append(window(at - 10 + i / 4, score))
                seeded = held()
                # windows from before the plan was made are not acted on; these are
                for i, score in enumerate((45, 45, 85, 85)):
                    await store.append(window(at + i / 4, score))
                easy = await followed(seeded.revision + 1)
                for i in range(4):
                    await store.append(window(at + 1 + i / 4, 45))
                asking = [asyncio.create_task(client.generate(f"hello {i}", model="small")) for i in range(40)]
                hard = await followed(easy.revision + 1)
                assert all(reply.text for reply in await asyncio.gather(*asking))
        finally:
            await redis.aclose()
    assert (easy.source, hard.source) == ("drift", "drift")
    assert "score of small" in hard.note
    assert present(hard.prediction).target == "quality >= 80"
    assert present(hard.prediction).quality >= 80
    assert plan_counts(hard)["large"] > plan_counts(easy)["large"]


async def test_a_redis_that_is_named_and_does_not_answer_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything else is started, by its address and without its password."""
    monkeypatch.setattr("penstock.local.redis_server.REDIS_TIMEOUT_S", 0.3)
    port = free_port()
    file = simulated_mesh(tmp_path, redis_url=f"redis://:secret@127.0.0.1:{port}/0")
    with pytest.raises(MeshFailed, match=f"no response from a Redis at 127.0.0.1:{port}") as caught:
        await LocalMesh(MeshOptions(file, tmp_path)).__aenter__()
    assert "secret" not in str(caught.value)
    assert not (tmp_path / "logs").exists()
