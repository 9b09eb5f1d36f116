"""The capacity of a router of several processes, compared with one process, with each process held to a share of a core.

Two saturated router processes, their clients and their worker do not fit on a machine of few cores. So each router process
may use SHARE of a core and no more (CPU bandwidth control of its cgroup), the others have the rest, and what the router
carries at that limit is measured, with one process and with several, in turns. The share of a core that each process has used
tells whether it was saturated. Needs a cgroup hierarchy that may be written (root); elsewhere the CPU alone is compared.
"""

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.cpu_time import cpu_s
from benchmarks.router_cost import RunningVersion, Version, load, running
from penstock import Client

COUNTS = (1, 2)
SHARE = 0.07  # of a core, for each router process: little enough that worker and clients can keep up with two
PERIOD_US = 20_000  # short, so that a process at its limit pauses for milliseconds
SHARES, WEIGHT = 16_384, 5_000  # (cgroup v1, v2) what is measured goes before other work of the machine
SATURATED = (0.9, 1.1)  # times its share: a process that used less had time to spare, one that used more was not held
WHOLE: dict[str, Any] = {"replies": 800, "connections": 128, "tokens": 32}
STREAMED: dict[str, Any] = {"replies": 384, "connections": 128, "tokens": 80}
CGROUP_V1, CGROUP_V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


def cgroup_root() -> Path | None:
    """Where groups with a CPU limit can be made; None where they cannot."""
    control = CGROUP_V2 / "cgroup.subtree_control"
    v2 = control.exists() and "cpu" in control.read_text().split()
    root = CGROUP_V2 if v2 else CGROUP_V1
    return root if os.access(root / "cgroup.procs", os.W_OK) else None


@contextmanager
def grouped(root: Path, pids: Sequence[int], share: float | None = None) -> Iterator[None]:
    """Processes go before other work of the machine, and use at most `share` of a core together, as long as this lasts.

    Raises:
        OSError: the group cannot be made.
    """
    group = root / f"penstock-bench-{pids[0]}"
    group.mkdir()
    quota_us = round(share * PERIOD_US) if share is not None else None
    limits = (
        {"cpu.cfs_period_us": f"{PERIOD_US}", "cpu.cfs_quota_us": f"{quota_us or -1}", "cpu.shares": f"{SHARES}"}
        if root == CGROUP_V1
        else {"cpu.max": f"{quota_us or 'max'} {PERIOD_US}", "cpu.weight": f"{WEIGHT}"}
    )
    try:
        for name, value in limits.items():
            (group / name).write_text(value)
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for member in (group / "cgroup.procs").read_text().split():
            (root / "cgroup.procs").write_text(member)
        group.rmdir()


@contextmanager
def limited(mesh: RunningVersion, root: Path | None) -> Iterator[None]:
    """Each of the router's serving processes is held to SHARE; its workers and clients are not. Nothing without `root`."""
    with ExitStack() as stack:
        if root is not None:
            routers = mesh.serving_pids()
            for pid in routers:
                stack.enter_context(grouped(root, [pid], SHARE))
            stack.enter_context(grouped(root, [os.getpid(), *(p for p in mesh.pids() if p not in routers)]))
        yield


def finished(mesh: RunningVersion) -> list[int]:
    """Requests that each process has finished so far."""
    with Client(mesh.admin, admin=mesh.admin) as client:
        status = client.status()
    return [process.finished for process in status.processes] or [status.finished]


def measured(mesh: RunningVersion, shape: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """One load: what was carried per second, and what each router process used for it."""
    pids, before = mesh.serving_pids(), finished(mesh)
    used = [cpu_s(pid) for pid in pids]
    result = load(mesh.url, "only", **shape, stream=stream)
    used, wall_s = [cpu_s(pid) - then for pid, then in zip(pids, used, strict=True)], result["seconds"]
    units = shape["replies"] * (shape["tokens"] if stream else 1)
    return {
        "per_s": units / result["seconds"],
        "cpu_us": 1e6 * sum(used) / units,
        "cores_used": [cpu / wall_s for cpu in used],
        "saturated": all(SATURATED[0] <= cpu / wall_s / SHARE <= SATURATED[1] for cpu in used),
        "replies_by_process": [now - then for now, then in zip(finished(mesh), before, strict=True)],
    }


def measure(rounds: int) -> dict[str, Any]:
    """A mesh of each kind, loaded in turns.

    ratios: several processes over one, round by round, of what is carried per second, where all were saturated, and of the
    capacity that follows from the CPU alone (count times CPU per unit with one over CPU per unit with several).
    """
    root = cgroup_root()
    if root is None:
        print(
            "no cgroup can be made here (needs root): the CPU is compared, not what is carried at a limit", flush=True
        )
    rows: dict[str, list[dict[str, Any]]] = {str(count): [] for count in COUNTS}
    with ExitStack() as stack:
        meshes = {count: stack.enter_context(running(Version("now", Path.cwd()), count)) for count in COUNTS}
        for mesh in meshes.values():
            load(mesh.url, replies=64, connections=32, tokens=8, stream=True)  # warm
        for number in range(rounds):
            for count in COUNTS if number % 2 == 0 else reversed(COUNTS):
                mesh = meshes[count]
                with limited(mesh, root):
                    row = {
                        "whole": measured(mesh, WHOLE, stream=False),
                        "streamed": measured(mesh, STREAMED, stream=True),
                    }
                rows[str(count)].append(row)
                for name, taken in row.items():
                    cores = ", ".join(f"{value:.3f}" for value in taken["cores_used"])
                    print(
                        f"round {number + 1}  {count} processes  {name:<9}{taken['per_s']:8.0f}/s  "
                        f"{taken['cpu_us']:7.1f} us each  cores {cores}  replies {taken['replies_by_process']}",
                        flush=True,
                    )
    one, several = COUNTS[0], COUNTS[-1]
    pairs = list(zip(rows[str(several)], rows[str(one)], strict=True))
    ratios = {
        name: {
            "measured": [
                a[name]["per_s"] / b[name]["per_s"] for a, b in pairs if a[name]["saturated"] and b[name]["saturated"]
            ],
            "derived": [several * b[name]["cpu_us"] / a[name]["cpu_us"] for a, b in pairs],
        }
        for name in ("whole", "streamed")
    }
    for name, kinds in ratios.items():
        for kind, values in kinds.items():
            if values:
                spread = f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
                print(f"{name}: {several} processes carry {spread} times what one does, {kind}, {len(values)} rounds")
    return {"share_of_a_core": SHARE, "whole": WHOLE, "streamed": STREAMED, "processes": rows, "ratios": ratios}


def run(rounds: int) -> None:
    print(report.write("router_scaling", measure(rounds)))
