"""The planner: whose plan holds after restarts, edits and operators."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock import AsyncPlannerClient, InvalidRequestError, Plan, SequenceInFlight, Stage, TierPlan
from penstock.services.domain.instances import Role
from penstock.services.field_problems import SettingsError
from penstock.types.deployments import ReplicaGroup
from penstock.types.planning import EngineBatch, MeasuredReplica, Trace
from penstock.types.plans import QoeModel
from tests.conftest import ROOT, MeshFileMaker
from tests.support.mesh import COMPOSE
from tests.support.present import present
from tests.support.questions import replan_question
from tests.support.services import RedisProcess, serving


class Planner:
    """A planner that can be started again and again over one mesh file."""

    def __init__(self, file: Path, redis_url: str) -> None:
        self._file, self._redis_url = file, redis_url

    async def __aenter__(self) -> AsyncPlannerClient:
        self._context = serving(Role.PLANNER, COMPOSE[Role.PLANNER], self._file, self._redis_url)
        chassis = await self._context.__aenter__()
        self._client = AsyncPlannerClient(chassis.admin_address)
        async for _ in self._client.watch_plan():  # until there is one
            break
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__(None, None, None)
        await self._context.__aexit__(None, None, None)


@pytest.fixture
async def planner(redis: RedisProcess, mesh_file: MeshFileMaker) -> AsyncIterator[AsyncPlannerClient]:
    async with Planner(mesh_file(), redis.url) as client:
        yield client


def with_tier(plan: Plan, at: int, **fields: Any) -> Plan:
    """The plan with other fields of a tier."""
    tiers = [dataclasses.replace(tier, **fields) if i == at else tier for i, tier in enumerate(plan.tiers)]
    return dataclasses.replace(plan, tiers=tuple(tiers))


async def test_the_mesh_files_plan_holds_and_a_restart_changes_nothing(
    redis: RedisProcess, mesh_file: MeshFileMaker
) -> None:
    file = mesh_file()
    async with Planner(file, redis.url) as planner:
        first = await planner.get_plan()
        assert first.revision == 1
        assert first.source == "mesh-file"
        assert [(t.name, t.threshold) for t in first.tiers] == [("small", 50), ("large", None)]
    async with Planner(file, redis.url) as planner:
        await asyncio.sleep(0)
        assert (await planner.get_plan()).revision == 1


async def test_an_operators_plan_survives_a_restart_but_not_an_edit_of_the_file(
    redis: RedisProcess, mesh_file: MeshFileMaker
) -> None:
    file = mesh_file()
    async with Planner(file, redis.url) as planner:
        plan = await planner.get_plan()
        tiers = (TierPlan("small", "sim-small", 70.0, 1), plan.tiers[1])
        made = await planner.set_plan(Plan(tiers=tiers, note="stricter"))
        assert (made.revision, made.source, made.note) == (2, "operator", "stricter")
        assert made.created_at > plan.created_at
    async with Planner(file, redis.url) as planner:
        assert (await planner.get_plan()).note == "stricter"
    file.write_text(file.read_text().replace("threshold: 50", "threshold: 40"))
    async with Planner(file, redis.url) as planner:
        async for plan in planner.watch_plan(after_revision=2):
            assert plan.revision == 3
            assert plan.tiers[0].threshold == 40
            break
        assert (await planner.get_plan(2)).note == "stricter"


async def test_a_plan_with_more_instances_than_may_be_is_refused(redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    """By the tier's field; nothing is published. The mesh file's own count may be greater, and stays allowed."""
    tiers = [{"name": "small", "model": "s", "threshold": 50, "workers": 9}, {"name": "large", "model": "l"}]
    async with Planner(mesh_file(tiers, planner={"max_instances": 4}), redis.url) as planner:
        plan = await planner.get_plan()
        assert [t.instances for t in plan.tiers] == [9, 1]
        with pytest.raises(InvalidRequestError) as caught:
            await planner.set_plan(with_tier(plan, 1, instances=5))
        assert [*caught.value.fields] == ["plan.tiers[1].instances"]
        assert "must be at most 4, not 5" in str(caught.value)
        with pytest.raises(InvalidRequestError, match="at most 9, not 1000"):
            await planner.set_plan(with_tier(plan, 0, instances=1000))
        assert (await planner.get_plan()).revision == plan.revision
        assert (await planner.set_plan(with_tier(plan, 1, instances=4))).tiers[1].instances == 4
    async with Planner(mesh_file(), redis.url) as planner:
        plan = await planner.get_plan()
        with pytest.raises(InvalidRequestError, match="at most 64, not 65"):
            await planner.set_plan(with_tier(plan, 0, instances=65))


async def test_a_plan_of_too_many_tiers_or_stages_is_refused_by_their_number(planner: AsyncPlannerClient) -> None:
    """Before any of them is looked at: a report of what is wrong with each would name thousands."""
    with pytest.raises(InvalidRequestError, match=r"plan\.tiers: at most 64 tiers, not 20000"):
        await planner.set_plan(Plan(tiers=(TierPlan("", "", 0.0, 0),) * 20_000))
    crowded = TierPlan("small", "sim-small", 50.0, 1, stages=(Stage(0, 0, 0),) * 1_025)
    with pytest.raises(InvalidRequestError, match=r"plan.tiers\[0\].stages: at most 1024 stages, not 1025"):
        await planner.set_plan(Plan(tiers=(crowded,)))


async def test_a_plan_without_any_instance_is_refused(planner: AsyncPlannerClient) -> None:
    """Nobody could answer; one tier that has some is enough."""
    plan = await planner.get_plan()
    one = with_tier(plan, 0, instances=0)
    with pytest.raises(InvalidRequestError, match=r"plan\.tiers: no tier has an instance"):
        await planner.set_plan(with_tier(one, 1, instances=0))
    kept = await planner.set_plan(one)
    assert [tier.instances for tier in kept.tiers] == [0, plan.tiers[1].instances]


async def test_watchers_see_every_plan_in_order(planner: AsyncPlannerClient) -> None:
    plan = await planner.get_plan()
    seen: list[int] = []

    async def watch() -> None:
        async for found in planner.watch_plan():
            seen.append(found.revision)
            if found.revision == 6:
                return

    watching = asyncio.create_task(watch())
    while not seen:
        await asyncio.sleep(0)
    for _ in range(5):
        made = await planner.set_plan(plan)
        while seen[-1] < made.revision:
            await asyncio.sleep(0)
    await watching
    assert seen == [1, 2, 3, 4, 5, 6]


async def test_a_tiers_stages_go_through_plan_and_redis_and_must_hold_its_instances(
    planner: AsyncPlannerClient,
) -> None:
    plan = await planner.get_plan()
    stages, qoe = (Stage(0, 512, 2), Stage(512, 4096, 1)), QoeModel(1e-3, 1e-4, 0.0, 0.0, 1e-6)
    tier = TierPlan("small", "sim-small", 50.0, 3, stages, qoe)
    await planner.set_plan(Plan(tiers=(tier, plan.tiers[1])))
    whole = dataclasses.replace(tier, replicas=(ReplicaGroup(1, 1, 3),))
    assert (await planner.get_plan()).tiers[0] == whole
    for unsound, field in (
        (dataclasses.replace(tier, instances=4), r"tiers\[0\]\.stages"),
        (dataclasses.replace(tier, stages=(Stage(8, 512, 3),)), r"stages\[0\]\.from_tokens"),
        (dataclasses.replace(tier, qoe=None), r"tiers\[0\]\.qoe"),
        (dataclasses.replace(tier, qoe=QoeModel(-1.0, 0.0, 0.0, 0.0, 0.0)), "qoe.batch_s"),
    ):
        with pytest.raises(InvalidRequestError, match=field):
            await planner.set_plan(Plan(tiers=(unsound, plan.tiers[1])))


@pytest.mark.slow
async def test_stages_are_planned_and_published_in_a_plan(planner: AsyncPlannerClient) -> None:
    plan = await planner.get_plan()
    tiers = (dataclasses.replace(plan.tiers[0], instances=6), plan.tiers[1])
    await planner.set_plan(Plan(tiers=tiers))
    lengths = [SequenceInFlight(int(8 * 1.045**i), int(10 * 1.045**i), 10 * i) for i in range(1, 150)]
    given: dict[str, Any] = {
        "qoe": (1e-3, 1e-4, 0.0, 0.0, 1e-5),
        "sequences": lengths,
        "kv_bytes_per_token": 1e5,
        "bandwidth_bytes_per_s": 1e10,
        "max_tokens": 8192,
    }
    found = await planner.plan_stages("small", **given)
    assert (found.gap, found.plan) == (0.0, None)
    assert sum(stage.instances for stage in found.stages) == 6
    assert found.quality < found.one_stage_quality
    assert (await planner.get_plan()).tiers[0].stages == ()
    assert found.verdict is None
    for changed, field in (
        ({"sequences": ()}, "sequences: missing"),
        ({"max_tokens": None}, "max_tokens: missing"),
        ({"bandwidth_bytes_per_s": 0.0}, "bandwidth_bytes_per_second"),
        ({"sequences": [SequenceInFlight(5, 3)]}, "sequences"),
    ):
        with pytest.raises(InvalidRequestError, match=field):
            await planner.plan_stages("small", **given | changed)
    with pytest.raises(InvalidRequestError, match="tier: must be small or large"):
        await planner.plan_stages("huge", **given)
    with pytest.raises(InvalidRequestError, match="qoe: missing"):
        await planner.plan_stages("large", **given | {"qoe": ()})


@pytest.mark.slow
async def test_what_the_replay_favours_is_published_and_nothing_else(planner: AsyncPlannerClient) -> None:
    """Short requests of one length, on instances that serve four at once: all of them on one of six are too many."""
    plan = await planner.get_plan()
    crowded, qoe = (Stage(0, 100, 1), Stage(100, 8192, 5)), (1e-3, 1e-4, 0.0, 0.0, 1e-5)
    tiers = (dataclasses.replace(plan.tiers[0], instances=6, stages=crowded, qoe=QoeModel(*qoe)), plan.tiers[1])
    before = await planner.set_plan(Plan(tiers=tiers))
    given: dict[str, Any] = {
        "kv_bytes_per_token": 1e5,
        "bandwidth_bytes_per_s": 1e10,
        "max_tokens": 8192,
        "trace": Trace.of((i / 2000, 20, 4) for i in range(600)),
        "replica": MeasuredReplica((0.0, 1.0), (1e-3, 1.001e-3), 1, 1, 50_000, EngineBatch(4)),
    }
    kept = await planner.plan_stages("small", **given, publish=True)
    assert (present(kept.verdict).use_stages, kept.plan, len(kept.stages)) == (False, None, 1)
    assert present(kept.verdict).sentence.startswith("Keep one stage")
    assert (await planner.get_plan()).revision == before.revision
    found = await planner.plan_stages("small", **given, against=crowded, publish=True)
    verdict, plan = present(found.verdict), present(found.plan)
    assert (verdict.favoured, verdict.use_stages) == (True, False)
    assert verdict.ttft_p95_change < 0
    assert plan == await planner.get_plan()
    assert (plan.source, plan.tiers[0].stages) == ("stages", ())
    assert verdict.sentence in plan.note
    with pytest.raises(InvalidRequestError, match="instance_count: must be the tier's, 6"):
        await planner.plan_stages("small", **given, instances=5, publish=True)
    with pytest.raises(InvalidRequestError, match="against: has 5 instances"):
        await planner.plan_stages("small", **given, against=(Stage(0, 8192, 5),))


async def test_a_plan_names_a_scorer_that_the_judge_has_or_none(planner: AsyncPlannerClient) -> None:
    """Else no answer could be judged, and every request would go to the largest tier."""
    plan = await planner.get_plan()
    with pytest.raises(InvalidRequestError, match=r"plan\.scorer.*confidence, not 'no-such-scorer'"):
        await planner.set_plan(Plan(tiers=plan.tiers, scorer="no-such-scorer"))
    assert (await planner.get_plan()).revision == plan.revision
    assert (await planner.set_plan(Plan(tiers=plan.tiers, scorer="confidence"))).scorer == "confidence"


async def test_no_plan_changes_the_model_of_a_tier(redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    """Its workers continue each other's replies, so they have one model. The name may be shorter, as catalogues have it."""
    tiers = [{"name": "small", "model": "Org/S-1B-Instruct", "threshold": 50}, {"name": "large", "model": "l"}]
    async with Planner(mesh_file(tiers), redis.url) as planner:
        plan = await planner.get_plan()
        problem = r"tiers\[0\]\.model: workers of tier small load S-1B-Instruct, not S-3B"
        with pytest.raises(InvalidRequestError, match=problem):
            await planner.set_plan(with_tier(plan, 0, model="S-3B", instances=2))
        assert await planner.get_plan() == plan
        assert (await planner.set_plan(with_tier(plan, 0, model="s-1b", instances=2))).tiers[0].instances == 2


async def test_a_plan_says_the_shapes_of_workers_that_their_engines_have(
    redis: RedisProcess, mesh_file: MeshFileMaker
) -> None:
    """One that says none gets the mesh file's, and one shape has as many as the tier. Endpoints have none."""
    tiers = [
        {"name": "small", "model": "Org/s", "threshold": 50, "engine": "torch"},
        {
            "name": "medium",
            "model": "Org/m",
            "threshold": 50,
            "engine": "sglang",
            "gpu_type": "H100",
            "sglang": {"tp": 2},
        },
        {"name": "large", "model": "l", "engine": "openai", "openai": {"endpoints": ["http://127.0.0.1:9/v1"]}},
    ]
    async with Planner(mesh_file(tiers), redis.url) as planner:
        plan = await planner.get_plan()
        own = [(ReplicaGroup(1, 1, 1),), (ReplicaGroup(2, 1, 1, gpu="H100"),), ()]
        assert [tier.replicas for tier in plan.tiers] == own

        async def published(at: int, instances: int, *replicas: ReplicaGroup) -> tuple[ReplicaGroup, ...]:
            made = await planner.set_plan(with_tier(plan, at, instances=instances, replicas=replicas))
            return made.tiers[at].replicas

        wide, on_a100 = ReplicaGroup(4, 2, 1), ReplicaGroup(1, 1, 2, gpu="A100")
        assert await published(1, 3) == (ReplicaGroup(2, 1, 3, gpu="H100"),)
        assert await published(1, 2, wide) == (ReplicaGroup(4, 2, 2, gpu="H100"),)
        assert await published(1, 3, wide, on_a100) == (dataclasses.replace(wide, gpu="H100"), on_a100)
        assert await published(1, 0, wide) == ()
        assert await published(2, 2, wide) == ()
        for at, replicas, problem in (
            (1, (wide, on_a100), r"tiers\[1\]\.replicas: are 3, but the tier has 4 instances"),
            (1, (ReplicaGroup(4, 1, 4, ep=3),), r"tiers\[1\]\.replicas\[0\]: sglang\.ep: must divide tp, 4, not 3"),
            (1, (ReplicaGroup(4, 1, 4, gpu="a/b"),), r"tiers\[1\]\.replicas\[0\]: must be like"),
            (0, (wide,), r"tiers\[0\]\.replicas\[0\]: the torch engine has no workers of the shape TP=4, PP=2"),
        ):
            with pytest.raises(InvalidRequestError, match=problem):
                await published(at, 4, *replicas)


async def test_a_plan_says_what_drafts_and_no_plan_changes_it(redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    """Workers load drafters when they start: a plan that names others would be wrong, one that names none is completed."""
    tiers = [
        {"name": "small", "model": "family/small", "threshold": 50, "engine": "torch"},
        {"name": "medium", "model": "Org/medium", "served_model_name": "m", "threshold": 50, "engine": "torch"},
        {"name": "large", "model": "l", "engine": "torch", "speculation": {"drafters": ["medium", "Org/Tiny-1B"]}},
    ]
    file = mesh_file(tiers)
    async with Planner(file, redis.url) as planner:
        plan = await planner.get_plan()
        assert [tier.drafters for tier in plan.tiers] == [(), (), ("m", "Tiny-1B")]
        for i, others in ((0, ("m",)), (2, ("m",)), (2, ("Tiny-1B", "other"))):
            with pytest.raises(InvalidRequestError, match=rf"plan\.tiers\[{i}\]\.drafters: workers of tier .* load"):
                await planner.set_plan(with_tier(plan, i, drafters=others))
        silent = tuple(dataclasses.replace(tier, drafters=(), instances=2) for tier in plan.tiers)
        published = await planner.set_plan(dataclasses.replace(plan, tiers=silent))
        assert published.revision == plan.revision + 1
        assert (published.tiers[2].instances, published.tiers[2].drafters) == (2, ("m", "Tiny-1B"))
        assert await planner.get_plan() == published
    file.write_text(
        file.read_text().replace("drafters:", "max_window: 3\n    drafters:").replace("Org/Tiny-1B", "small")
    )
    async with Planner(file, redis.url) as planner:
        async for plan in planner.watch_plan(after_revision=published.revision):
            assert plan.tiers[2].drafters == ("m", "small")
            break


async def test_what_a_planner_could_never_plan_again_on_ends_its_boot(
    redis: RedisProcess, mesh_file: MeshFileMaker, tmp_path: Path
) -> None:
    """A trace of too few requests, models of other tiers and drafters that no worker loads are found at the start and not at
    the first drift."""
    trace = tmp_path / "trace.csv"
    lines = (ROOT / "examples" / "trace.csv").read_text().splitlines()
    replan = {"enabled": True, "question": str(tmp_path / "question.yaml")}
    drafted = tmp_path / "drafted.yaml"
    content = yaml.safe_load((ROOT / "tests" / "planner" / "two-tiers.yaml").read_text())
    content["tiers"][1]["speculation"] = {"drafters": [{"model": "qwen2.5-0.5b", "acceptance": 0.7}]}
    drafted.write_text(yaml.safe_dump(content))
    for rows, changed, said in (
        (20, {"models": str(drafted)}, "tier large is planned with drafts of qwen2.5-0.5b, its workers load nothing"),
        (19, {}, "its trace has 19 requests"),
        (20, {"models": str(ROOT / "examples" / "deepseek-cascade.yaml")}, "its models have the tiers"),
        (20, {"rules": {"skip": True}}, "leave out rules"),
        (20, {"min_quality": 101}, "min_quality: must be from 0 to 100"),
    ):
        trace.write_text("\n".join(lines[: rows + 1]) + "\n")
        replan_question(tmp_path, **{"trace": str(trace), "min_quality": 80} | changed)
        with pytest.raises(SettingsError, match=said):
            async with Planner(mesh_file(planner={"replan": replan}), redis.url):
                pass
