"""What docs/how-to/operations.md says of backups, word for word, with a real Redis."""

import asyncio
import os
import re
import shutil
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from redis.asyncio import Redis

from penstock.services.processes import free_port
from penstock.services.state.connection import StateUnavailable, connect
from penstock.services.state.keys import Keys
from penstock.services.state.plans import PlanStore
from penstock.services.state.usage import UsageOf, UsageStore
from penstock.types.plans import Plan, TierPlan
from tests.conftest import ROOT
from tests.support.present import present
from tests.support.services import RedisProcess
from tests.support.waiting import until_answered

PAGE = ROOT / "docs" / "how-to" / "operations.md"
KEYS = Keys("backed-up")
USAGE = {UsageOf("acme", "k", "small"): {"requests": 3.0}}
WAIT_S = 60.0
RESTORE = "restore, in the folder of dump.rdb"


def commands() -> dict[str, str]:
    """The block of the page's section on backups, by what each command is for."""
    section = present(re.search(r"^## Backup$(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))[1]
    block = present(re.search(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))[1]
    lines = [line.partition("#") for line in block.splitlines()]
    return {purpose.strip(): command.strip() for command, _, purpose in lines}


async def restored(client: Redis) -> tuple[Plan | None, object] | None:
    """The current plan and the usage, if the Redis answers."""
    with suppress(StateUnavailable):
        return await PlanStore(client, KEYS).current(), await UsageStore(client, KEYS).read(1, time.time())
    return None


async def is_kept(client: Redis) -> bool:
    """Whether the append-only file has all of the data."""
    state = await client.info("persistence")
    return bool(state["aof_enabled"]) and not (state["aof_rewrite_scheduled"] or state["aof_rewrite_in_progress"])


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed")
async def test_a_backup_brings_plans_and_usage_back(own_redis: RedisProcess, tmp_path: Path) -> None:
    """Into a new Redis, which keeps them: after a restart with an append-only file they are there, too."""
    client = connect(own_redis.url)
    published = await PlanStore(client, KEYS).publish(Plan(0, (TierPlan("small", "m", None, 1),)))
    await UsageStore(client, KEYS).add(USAGE, time.time())
    await client.aclose()
    new = f"redis://127.0.0.1:{free_port()}/0"
    environment = os.environ | {"URL": own_redis.url, "NEW": new}
    place = ["--port", new.rpartition(":")[2].removesuffix("/0"), "--bind", "127.0.0.1", "--save", ""]

    def run(purpose: str) -> None:
        subprocess.run(["bash", "-ec", commands()[purpose]], cwd=tmp_path, env=environment, check=True, timeout=WAIT_S)

    run("back up")
    own_redis.stop()
    for start in (RESTORE, "from then on"):
        server = await asyncio.create_subprocess_exec(*commands()[start].split(), *place, cwd=tmp_path)
        try:
            async with connect(new) as client:
                assert await until_answered(partial(restored, client)) == (published, USAGE)
                if start == RESTORE:
                    await asyncio.to_thread(run, "keep it")
                    await until_answered(partial(is_kept, client))
        finally:
            server.terminate()
            await server.wait()
