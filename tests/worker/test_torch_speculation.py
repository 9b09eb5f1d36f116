"""Models that draft for the torch engine: the replies stay the same, whatever drafts and however it is computed."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint

from models.training import tasks
from penstock.services.clock import SystemClock
from penstock.services.domain.speculation.choice import ChainCandidate
from penstock.services.extensions.engines import tier_problems
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.mesh_schema.tiers import MeshSpeculation, MeshTier
from penstock.services.settings import ServiceSettings
from penstock.types.mesh_status import Drafting
from penstock.types.prompts import ChatMessage, ChatPrompt, TokenPrompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.worker_service.compose import build_engine
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.draft_model import DraftModel
from penstock.worker_service.engine.extension import EngineSite
from penstock.worker_service.engine.interface import EngineUnusable, Speculating
from penstock.worker_service.engine.tier_options import drafter_folders
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_core
from penstock.worker_service.speculation.adaptive import AdaptiveDrafter
from penstock.worker_service.speculation.sources import DraftRequest
from penstock.worker_service.telemetry.load_tracker import LoadTracker
from tests.conftest import FAMILY
from tests.support.present import present

MOST = 28
GREEDY = SamplingParams(temperature=0.0, max_tokens=MOST)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=MOST)
PENALIZED = replace(SAMPLED, frequency_penalty=1.2, presence_penalty=0.4, repetition_penalty=1.3)
SAMPLING_NAMES = {GREEDY: "greedy", SAMPLED: "sampled", PENALIZED: "penalized"}
Replies = list[list[int]]


def build(folder: Path, *drafters: Path, **options: Any) -> EngineCore:
    core, _ = torch_core(
        TorchEngineOptions(folder, "m", drafters=drafters, **{"kv_tokens": 4096, **options}), SystemClock()
    )
    return core


def requests(prompts: list[list[int]], sampling: SamplingParams) -> list[GenerationRequest]:
    """Each with its own seed."""
    return [
        GenerationRequest(
            f"r{i}", TokenPrompt(tuple(ids)), replace(sampling, seed=i) if sampling.temperature else sampling
        )
        for i, ids in enumerate(prompts)
    ]


def run_all(core: EngineCore, prompts: list[list[int]], sampling: SamplingParams, together: int = 8) -> Replies:
    """The replies to all prompts, so many active at once."""
    replies: dict[str, list[int]] = {f"r{i}": [] for i in range(len(prompts))}
    waiting = list(zip(requests(prompts, sampling), prompts, strict=True))
    while waiting or not core.idle:
        while waiting and len(core.scheduler.running) + len(core.scheduler.waiting) < together:
            core.add(*waiting.pop(0))
        for name, event in core.step():
            if isinstance(event, TokenFrame):
                replies[name] += event.token_ids
    return list(replies.values())


def always(core: EngineCore, window: int, chain: tuple[int, ...] = (0,)) -> AdaptiveDrafter:
    """Have a chain of models draft in every step, whatever is measured."""
    drafter = core.proposals.drafter
    assert isinstance(drafter, AdaptiveDrafter)
    drafter.chooser.current = ChainCandidate(chain, window)
    drafter.chooser.choose = lambda replies, missing: drafter.chooser.current  # type: ignore[method-assign]  # noqa: ARG005
    drafter.chooser.least = lambda replies: 0.0  # type: ignore[method-assign]  # noqa: ARG005
    return drafter


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = build(FAMILY / "small").tokenizer
    questions = tasks.single_turns(8, seed=3)
    return [tokenizer.encode(ChatPrompt((ChatMessage("user", q.prompt),))) for q in questions]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> dict[SamplingParams, Replies]:
    """The replies of the medium model without drafts."""
    core = build(FAMILY / "medium")
    return {sampling: run_all(core, prompts, sampling) for sampling in (GREEDY, SAMPLED, PENALIZED)}


WAYS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "small_blocks_and_chunks": {"kv_block_tokens": 4, "max_step_tokens": 37},
    "gathered": {"kernel": False, "kv_block_tokens": 5},
}


@pytest.mark.parametrize(
    ("way", "sampling"),
    [
        ("compiled", GREEDY),
        ("compiled", SAMPLED),
        ("compiled", PENALIZED),
        ("small_blocks_and_chunks", GREEDY),
        ("small_blocks_and_chunks", SAMPLED),
        ("gathered", SAMPLED),
    ],
    ids=lambda value: value if isinstance(value, str) else SAMPLING_NAMES[value],
)
def test_replies_are_the_same_with_and_without_drafts(
    way: str, sampling: SamplingParams, prompts: list[list[int]], expected: dict[SamplingParams, Replies]
) -> None:
    """One at a time and eight together; most drafted tokens stand, so there are far fewer steps than tokens."""
    core = build(FAMILY / "medium", FAMILY / "small", **WAYS[way])
    always(core, 5)
    for together in (1, 8):
        steps = core.steps
        assert run_all(core, prompts, sampling, together) == expected[sampling]
        tokens = sum(map(len, expected[sampling]))
        if together == 1:
            assert core.steps - steps < 0.7 * tokens
    assert core.proposals.of_drafter.accepted > 0.5 * core.proposals.of_drafter.verified
    assert core.scheduler.pool.free == core.scheduler.pool.count


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_replies_are_the_same_with_a_chain_of_two_models(sampling: SamplingParams, prompts: list[list[int]]) -> None:
    """One at a time and eight together. The medium model hands on its own tokens only, most of which the large one draws."""
    expected = run_all(build(FAMILY / "large"), prompts, sampling)
    core = build(FAMILY / "large", FAMILY / "medium", FAMILY / "small")
    drafter = always(core, 4, (0, 1))
    assert [model.name for model in drafter.models] == ["small", "medium"], "small to large, whatever the order given"
    for together in (1, 8):
        assert run_all(core, prompts, sampling, together) == expected
    small, medium = drafter.models
    assert 0.5 * small.verified < small.accepted <= small.verified
    assert medium.accepted > 0.6 * medium.verified
    assert core.proposals.of_drafter.verified >= medium.verified  # those at the end of a reply teach nothing
    assert core.scheduler.pool.free == core.scheduler.pool.count
    assert all(model.model._pool.free == model.model._pool.count for model in drafter.models)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_sampled_replies_equal_the_undrafted_ones_for_a_thousand_seeds(prompts: list[list[int]]) -> None:
    """Drafter and target draw with the same random number at the same position."""
    sampling = replace(SAMPLED, temperature=1.3, top_p=1.0, max_tokens=6)
    many = [prompts[0][-30:]] * 1000  # request i has seed i
    options = {"max_running": 64, "max_step_tokens": 1024}
    plain = run_all(build(FAMILY / "medium", **options), many, sampling, 64)
    core = build(FAMILY / "medium", FAMILY / "small", **options)
    always(core, 3)
    assert run_all(core, many, sampling, 64) == plain
    assert len({tuple(reply) for reply in plain}) > 100
    assert core.proposals.of_drafter.accepted > 100


def test_replies_are_the_same_with_preemptions(
    prompts: list[list[int]], expected: dict[SamplingParams, Replies]
) -> None:
    longest = max(map(len, prompts)) + MOST
    core = build(FAMILY / "medium", FAMILY / "small", kv_tokens=2 * longest, kv_block_tokens=4)
    always(core, 7)
    assert run_all(core, prompts, GREEDY) == expected[GREEDY]
    assert core.scheduler.preemptions > 0


@pytest.mark.slow
def test_a_model_drafts_the_same_in_the_compiled_loop_and_step_by_step(prompts: list[list[int]]) -> None:
    """Greedy and sampled, along a reply of its own, of which it keeps the KV that stands."""
    core, stepwise = build(FAMILY / "small"), build(FAMILY / "small", compiled=False)
    for sampling in (GREEDY, replace(SAMPLED, seed=3), replace(SAMPLED, seed=4, top_k=3, temperature=2.0)):
        replies = []
        for runner in (core.runner, stepwise.runner):
            model = DraftModel(runner, 200, max_context_tokens=512, max_step_tokens=16)
            assert model.compiled is (runner is core.runner)
            tokens, rounds = list(prompts[0]), 0
            while len(tokens) < len(prompts[0]) + MOST:
                output = len(tokens) - len(prompts[0])
                request = DraftRequest("a", list(tokens), 5, sampling, output)
                while model.missing(request) > model.known_tokens:
                    model.catch_up([request])
                draft = model.draft([request], 4 + rounds % 3)[0] or []
                assert draft
                # Every third time the last two tokens do not stand: others are in their places.
                tokens += draft if rounds % 3 else [*draft[:-2], 65]
                rounds += 1
                assert model.missing(DraftRequest("a", list(tokens), 5, sampling, 0)) <= 4
            replies.append(tokens)
            model.forget("a")
            assert model._pool.free == 200
        assert replies[0] == replies[1]


def test_a_draft_ends_where_its_model_is_unsure(prompts: list[list[int]]) -> None:
    core = build(FAMILY / "small")
    model = DraftModel(core.runner, 200, max_context_tokens=512, max_step_tokens=512)
    request = DraftRequest("a", prompts[0], 7, GREEDY, 0)
    model.catch_up([request])
    whole = model.draft([request], 7)[0] or []
    assert len(whole) == 7
    lengths = [len(model.draft([request], 7, least)[0] or ()) for least in (1e-9, 0.5, 0.9, 1.1)]
    assert lengths[0] == 7
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 0
    assert model.draft([request], 7, 0.5)[0] == whole[: lengths[1]]


def test_replies_beyond_a_models_context_or_pool_are_not_drafted(prompts: list[list[int]]) -> None:
    """Blocks of inactive replies are taken; those of active ones are not."""
    core = build(FAMILY / "small")

    def make(blocks: int, context: int) -> DraftModel:
        runner: Any = core.runner
        return DraftModel(runner, blocks, max_context_tokens=context, max_step_tokens=512)

    first = DraftRequest("a", prompts[0], 3, GREEDY, 0)
    second = replace(first, request_id="b")
    short = make(100, len(prompts[0]))
    short.catch_up([first])
    assert short.draft([first], 3) == [None]
    blocks = -(-(len(prompts[0]) + 3) // core.scheduler.pool.block_tokens)
    narrow = make(blocks, 512)
    narrow.catch_up([first, second])
    drafts = narrow.draft([first, second], 3)
    assert [draft and len(draft) for draft in drafts] == [3, None]
    narrow.catch_up([second])
    assert len(narrow.draft([second], 3)[0] or ()) == 3
    assert narrow.missing(first) == len(prompts[0])


@pytest.mark.parametrize("method", ["draft", "catch_up"])
def test_a_model_that_fails_is_dropped_and_replies_go_on(
    method: str, prompts: list[list[int]], expected: dict[SamplingParams, Replies], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = build(FAMILY / "medium", FAMILY / "small")
    drafter = always(core, 5)
    calls = 0
    work = getattr(drafter.models[0].model, method)

    def fails_later(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise RuntimeError("out of memory")
        return work(*arguments)

    monkeypatch.setattr(drafter.models[0].model, method, fails_later)
    assert run_all(core, prompts, GREEDY, 2) == expected[GREEDY]
    assert drafter.failures == core.proposals.state().counts["model"].failures == 1
    drafting = present(core.proposals.drafting())
    assert drafting.chain == ()


def with_other_tokens(model: Path, folder: Path) -> Path:
    """A copy of a model with another vocabulary."""
    folder.mkdir()
    for file in model.iterdir():
        content = file.read_bytes()
        if file.name == "tokenizer.json":
            tokenizer = json.loads(content)
            vocabulary = tokenizer["model"]["vocab"]
            vocabulary["another"] = vocabulary.pop("a")
            content = json.dumps(tokenizer).encode()
        (folder / file.name).write_bytes(content)
    return folder


def test_models_that_cannot_draft_are_refused_by_name(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    with pytest.raises(EngineUnusable, match=r"config\.json"):
        build(tiny_models["llama"], tmp_path)
    other = with_other_tokens(tiny_models["llama"], tmp_path / "other")
    with pytest.raises(EngineUnusable, match=r"speculation\.drafters: .*other: its tokenizer has other tokens"):
        build(tiny_models["llama"], other)


def test_auto_takes_the_models_of_the_tiers_before_that_have_the_same_tokens(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    """Once each; tiers of other engines, the tier's own model and those behind it are left out."""
    other = with_other_tokens(tiny_models["llama"], tmp_path / "other")
    mesh = MeshFile.model_validate(
        {
            "tiers": [
                {"name": "a", "model": str(FAMILY / "small"), "threshold": 50},
                {"name": "b", "model": str(FAMILY / "small"), "threshold": 50},
                {"name": "other", "engine": "simulated", "threshold": 50},
                {"name": "c", "model": str(other), "threshold": 50},
                {"name": "last", "model": str(FAMILY / "medium"), "threshold": 50, "speculation": "auto"},
                {"name": "behind", "model": str(FAMILY / "large")},
            ]
        }
    )
    assert [p for tier in mesh.tiers for p in tier_problems(mesh, tier, ServiceSettings())] == []
    folders = drafter_folders(EngineSite(mesh, mesh.tiers[4], ServiceSettings()))
    assert folders == (FAMILY / "small", other)
    with pytest.raises(EngineUnusable, match="other tokens"):
        build(FAMILY / "medium", *folders)
    drafter = build(FAMILY / "medium", *folders, skips_drafters=True).proposals.drafter
    assert isinstance(drafter, AdaptiveDrafter)
    assert [model.name for model in drafter.models] == ["small"]


async def test_a_tiers_drafters_draft_for_its_requests(
    prompts: list[list[int]], expected: dict[SamplingParams, Replies]
) -> None:
    """By the tier's name in the mesh file; the state is what metrics show."""
    tiers = (
        MeshTier(name="first", model=str(FAMILY / "small"), threshold=50),
        MeshTier(
            name="last", model=str(FAMILY / "medium"), speculation=MeshSpeculation(drafters=("first",), max_window=3)
        ),
    )
    mesh, settings = MeshFile(tiers=tiers), ServiceSettings()
    engine = build_engine(mesh, tiers[1], settings)
    await engine.start()
    try:
        assert isinstance(engine, Speculating)
        always(engine._core, 3)  # type: ignore[attr-defined]
        reader = InMemoryMetricReader()
        LoadTracker(engine, MeterProvider([reader]).get_meter("test"), "last")

        async def reply(request: GenerationRequest) -> list[int]:
            frames = [e async for e in engine.generate(request) if isinstance(e, TokenFrame)]
            return [token for frame in frames for token in frame.token_ids]

        assert await asyncio.gather(*map(reply, requests(prompts, GREEDY))) == expected[GREEDY]
        state = engine.speculation()
        assert state.drafting is not None
        assert (state.drafting.chain, state.drafting.window) == (("small",), 3)
        share = state.drafting.accepted_share
        counts = state.counts["model"]
        assert counts.verified >= counts.accepted > 0
        assert state.counts["given"].verified == 0
        assert _metrics(reader) == {
            ("tokens", "model", "accepted"): counts.accepted,
            ("tokens", "model", "rejected"): counts.verified - counts.accepted,
            ("tokens", "given", "accepted"): 0,
            ("tokens", "given", "rejected"): 0,
            ("failures", "model"): 0,
            ("failures", "given"): 0,
            ("window", "small"): 3,
            ("acceptance",): share,
        }
        assert 0.5 < present(share) <= 1
        assert engine.load().drafting == Drafting(("small",), 3, present(share))
    finally:
        await engine.close()


def _metrics(reader: InMemoryMetricReader) -> dict[tuple[str, ...], float]:
    """The metrics of drafts, by name and labels."""
    data = present(reader.get_metrics_data())
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    values = dict[tuple[str, ...], float]()
    for metric in metrics:
        name = metric.name.removeprefix("penstock.worker.draft_")
        for point in metric.data.data_points if name != metric.name else ():
            labels = {key: str(value) for key, value in (point.attributes or {}).items()}
            assert labels.pop("penstock.tier") == "last"
            assert isinstance(point, NumberDataPoint)
            parts = (labels.get(f"penstock.draft.{label}") for label in ("source", "chain", "outcome"))
            values[name, *(part for part in parts if part)] = point.value
    return values


@pytest.mark.parametrize(
    ("tier", "drafter", "problem"),
    [
        ({"engine": "simulated"}, "first", "simulated engine does not use it"),
        ({}, "last", "must be another model"),
        ({}, "large", "must be another model"),
        ({}, "empty", "tier 'empty' has no model"),
    ],
)
def test_drafters_that_contradict_the_mesh_file_are_refused(tier: dict[str, Any], drafter: str, problem: str) -> None:
    mesh = MeshFile(
        tiers=(
            MeshTier(name="first", model="small", threshold=50),
            MeshTier(name="empty", engine="simulated", threshold=50),
            MeshTier(name="last", model="large", speculation=MeshSpeculation(drafters=(drafter,)), **tier),
        )
    )
    (found,) = (p for p in tier_problems(mesh, mesh.tiers[2], ServiceSettings()) if "speculation" in p.field)
    assert found.field.startswith("tiers[2].speculation")
    assert problem in found.problem
