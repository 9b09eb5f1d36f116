"""The processes of `tests.support.mortal`, for the test that starts them."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tests.conftest import ROOT


class Mortals:
    """Processes of which each dies at its point. killed: those that have; none should end in another way."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.killed: set[str] = set()
        self._ended: set[str] = set()

    async def read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            name, how = line.decode().split()
            (self.killed if how == "killed" else self._ended).add(name)

    def lives(self, name: str) -> bool:
        assert name not in self._ended, f"{name} ended before it could be killed"
        return name not in self.killed


@asynccontextmanager
async def mortals(points: Mapping[str, str], mesh_file: Path, redis_url: str, **more: object) -> AsyncIterator[Mortals]:
    """points: by name. more: settings of all of them, which are workers of the tier `only` or routers."""
    settings = {"mesh_file": mesh_file, "redis_url": redis_url, "tier": "only", "log_level": "error", **more}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.mortal", *(f"{name}={point}" for name, point in points.items())),
        env=os.environ | {f"PENSTOCK_{name.upper()}": str(value) for name, value in settings.items()},
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    made = Mortals(process)
    reading = asyncio.create_task(made.read())
    try:
        yield made
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading
