"""What callers of the judge choose never becomes a metric's label."""

import asyncio
import re

from penstock.proto.common.v1 import common_pb2
from penstock.proto.judge.v1 import judge_pb2 as pb
from tests.conftest import MeshFileMaker
from tests.support.measured import metrics_page
from tests.support.mesh import served_judge
from tests.support.services import RedisProcess


async def test_tiers_of_no_mesh_share_one_label(redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    """Scores of names that the mesh file does not have are counted together; its own tiers keep theirs."""
    prompt = common_pb2.Prompt(text="x")
    summary = pb.LogprobSummary(tokens=1, mean=-0.1, least=-0.1)
    names = ["small", *(f"bogus-{i}" for i in range(50))]
    items = [pb.JudgedAnswer(prompt=prompt, answer="y", tier=name, logprobs=summary) for name in names]
    async with served_judge(mesh_file(), redis.url) as (stub, chassis):
        await stub.Score(pb.ScoreRequest(items=items))
        page = await asyncio.to_thread(metrics_page, chassis.telemetry.metrics_address)
    scores = [line for line in page.splitlines() if "judge_score" in line]
    tiers = {tier for line in scores for tier in re.findall(r'penstock_tier="([^"]*)"', line)}
    assert tiers == {"small", "unknown"}
