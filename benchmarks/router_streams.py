"""How many streams of 10 ms tokens one router process carries, at a quarter of the speed.

1,000 such streams, their clients and their worker need several cores. So time is stretched: the router's process is held to a
quarter of a core (CPU bandwidth control of its cgroup), and every stream gets a token each 40 ms instead of 10, which is the
same work per CPU second. Worker and clients are separate processes on the other cores. Streams are carried if their tokens
arrive at the engine's pace; if not, the share that the router has used tells whether it was the limit. The savings of a busy
router that joins parts of answers are left out: they depend on the share of a whole core. Needs a cgroup hierarchy that may
be written (root); elsewhere only the CPU per token counts.
"""

import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.cpu_time import cpu_s
from benchmarks.router_cost import RunningVersion, Version, load, running
from benchmarks.router_scaling import cgroup_root, grouped

SHARE = 0.25  # of a core
STEP_MS, TOKEN_MS = 10.0, 0.001  # of the engine at full speed: a step, and each stream in it
STREAMS = (250, 500, 750, 1000)
TOKENS = 600  # of a stream: 24 seconds, so that opening the streams is a small part
CLIENTS = 2
CARRIED_PACE = 0.95  # of the engine's
SATURATED = 0.9  # of its share: a router that used less waited for its worker or its clients


def measured(mesh: RunningVersion, streams: int) -> dict[str, float]:
    """All streams at once. pace: of their tokens, over the engine's. cores: used by the router's process.

    The pace of a stream is that from its first token to its last, medians of all. A step of the engine takes the simulated
    time and the CPU time that the worker's process spends on it, for Python runs one of its threads at a time.
    """
    (pid,), before = mesh.serving_pids(), mesh.worker_cpu_s()
    before_s = cpu_s(pid)
    share = streams // CLIENTS
    with ThreadPoolExecutor(CLIENTS) as clients:
        loads = [
            clients.submit(load, mesh.url, replies=share, connections=share, tokens=TOKENS, stream=True)
            for _ in range(CLIENTS)
        ]
        results = [each.result() for each in loads]
    used_s = cpu_s(pid) - before_s
    loop_s, engine_s = (now - then for now, then in zip(mesh.worker_cpu_s(), before, strict=True))
    tokens = share * CLIENTS * TOKENS
    step_s = (STEP_MS / SHARE + TOKEN_MS * streams) / 1000 + streams * (loop_s + engine_s) / tokens
    stream_s = statistics.mean(r["reply_ms"]["p50"] - r["first_token_ms"]["p50"] for r in results) / 1000
    return {
        "streams": streams,
        "pace": (TOKENS - 1) * step_s / stream_s,
        "cores": (cores := used_s / max(result["seconds"] for result in results)),
        "saturated": cores >= SATURATED * SHARE,
        "cpu_us_per_token": 1e6 * used_s / tokens,
        "worker_loop_cpu_us_per_token": 1e6 * loop_s / tokens,
    }


def measure(rounds: int) -> dict[str, Any]:
    """Each number of streams `rounds` times.

    carried: the largest number that was carried in the median. by_cpu: what one core carries by the CPU per token.
    """
    root, rows = cgroup_root(), list[dict[str, float]]()
    if root is None:
        print("no cgroup can be made here (needs root): the router may use a whole core", flush=True)
    with ExitStack() as stack:
        mesh = stack.enter_context(running(Version("now", Path.cwd()), streams=max(STREAMS), step_ms=STEP_MS / SHARE))
        load(mesh.url, replies=64, connections=32, tokens=8, stream=True)  # warm
        if root is not None:
            routers = mesh.serving_pids()
            stack.enter_context(grouped(root, routers, SHARE))
            stack.enter_context(grouped(root, [os.getpid(), *(pid for pid in mesh.pids() if pid not in routers)]))
        for number in range(rounds):
            for streams in STREAMS:
                row = measured(mesh, streams)
                rows.append(row)
                line = "  ".join(f"{key} {value:.3f}" for key, value in row.items())
                print(f"round {number + 1}  {line}", flush=True)
    pace = {n: statistics.median(row["pace"] for row in rows if row["streams"] == n) for n in STREAMS}
    return {
        "share_of_a_core": SHARE if root is not None else 1.0,
        "tokens_per_stream": TOKENS,
        "rows": rows,
        "pace": pace,
        "by_cpu": 1e6 * STEP_MS / 1000 / statistics.median(row["cpu_us_per_token"] for row in rows),
        "carried": max((n for n in STREAMS if pace[n] >= CARRIED_PACE), default=0),
    }


def run(rounds: int) -> None:
    figures = measure(rounds)
    print(
        f"{report.write('router_streams', figures)}\ncarried: {figures['carried']} streams; by CPU: {figures['by_cpu']:.0f}"
    )
