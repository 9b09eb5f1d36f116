"""Mixtures of experts on GPUs: what a batch reads, expert parallelism, data-parallel attention."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.planner_service.deployment.search import LatencyTable
from penstock.planner_service.files.catalogue import catalogue
from penstock.planner_service.files.hardware import gpu_of_catalogue, model_of_catalogue, model_spec
from penstock.planner_service.files.profiles import Profile, read_profile, write_profile
from penstock.planner_service.question.site import Site, replica_kinds
from penstock.planner_service.simulator import Dispatch, EngineLimits, Replica, Workload, serve
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import (
    ClusterSpec,
    ReplicaShape,
    Runtime,
    busiest_gpu_load,
    fit,
    roofline,
)
from penstock.services.domain.latency import StepLatencyModel
from penstock.types.planning import Model
from tests.support.present import present

R1 = model_of_catalogue("deepseek-r1-671b")
PLAIN, WIDE = ReplicaShape(8, 1), ReplicaShape(8, 1, ep=8, attn_dp=8)
ATTENTION, EXPERTS = ReplicaShape(8, 1, attn_dp=8), ReplicaShape(8, 1, ep=8)
QUIET = Runtime(step_overhead_s=0.0, link_latency_s=0.0)


def cluster(gpu: str = "h200", nodes: int = 1, link_bytes_per_s: float | None = None) -> ClusterSpec:
    spec = gpu_of_catalogue(gpu)
    return ClusterSpec(
        dataclasses.replace(spec, link_bytes_per_s=link_bytes_per_s or spec.link_bytes_per_s), nodes, 8, 50e9
    )


def routed(tokens: int, gpus: int, rng: np.random.Generator) -> tuple[float, float]:
    """(share of R1's experts that are used, load of the busiest GPU over the mean) under uniform routing."""
    chosen = np.array([rng.choice(R1.experts, R1.experts_per_token, replace=False) for _ in range(tokens)])
    load = np.bincount(chosen.ravel() * gpus // R1.experts, minlength=gpus)
    return len(np.unique(chosen)) / R1.experts, float(load.max() / load.mean())


@pytest.mark.parametrize(("tokens", "share"), [(1, 0.031), (8, 0.224), (32, 0.638), (128, 0.983)])
def test_a_batch_reads_the_experts_that_its_tokens_use(tokens: int, share: float) -> None:
    """A batch of 32 on DeepSeek R1 reads about 64 % of the routed experts, and all other weights."""
    rng = np.random.default_rng(1)
    assert R1.expert_coverage(tokens) == pytest.approx(share, abs=1e-3)
    assert np.mean([routed(tokens, 8, rng)[0] for _ in range(100)]) == pytest.approx(share, rel=0.02)
    step = roofline(R1, ReplicaShape(1, 1), cluster(), QUIET)
    read_bytes = 671e9 - 653.9e9 * (1 - R1.expert_coverage(tokens))
    assert step.base_s(tokens) == pytest.approx(read_bytes / (0.8 * 4800e9))
    assert read_bytes / 671e9 == pytest.approx(0.647, abs=1e-3) or tokens != 32


def test_a_model_without_experts_reads_at_most_the_active_parameters_of_each_token() -> None:
    entry = catalogue("models")["qwen3-30b-a3b"]
    bare = {name: value for name, value in entry.items() if "expert" not in name}
    step = roofline(model_spec(Model("bare", **bare), "model"), ReplicaShape(1, 1), cluster(), QUIET)
    assert step.base_s(1) == pytest.approx(2 * 3.3e9 / (0.8 * 4800e9))
    assert step.base_s(16) == pytest.approx(2 * 30.5e9 / (0.8 * 4800e9))


@pytest.mark.parametrize(
    ("name", "layers", "inner"),
    [
        ("qwen3-30b-a3b", 48, 768),
        ("qwen3-235b-a22b", 94, 1536),
        ("deepseek-r1-671b", 58, 2048),
        ("deepseek-r1-671b-awq", 58, 2048),
    ],
)
def test_experts_of_the_catalogue_follow_from_published_configs(name: str, layers: int, inner: int) -> None:
    """Gate, up and down projection of each expert; the rest is attention, dense layers and embeddings, all active."""
    spec = model_of_catalogue(name)
    assert spec.expert_parameters == pytest.approx(layers * spec.experts * 3 * spec.hidden * inner, rel=1e-3)
    rest = spec.parameters - spec.expert_parameters
    assert 0.4 * rest < spec.attention_parameters < rest
    assert spec.active_parameters == pytest.approx(rest + spec.active_expert_parameters, rel=0.03)


def test_attention_of_deepseek_r1_is_that_of_its_config() -> None:
    compressed = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576  # queries; keys and values
    assert R1.attention == pytest.approx(61 * (compressed + 512 * 128 * 256 + 128 * 128 * 7168), rel=1e-3)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"experts": None}, "experts: is needed with experts_per_token and expert_parameters"),
        ({"experts_per_token": None, "expert_parameters": None}, "experts_per_token: is needed with experts"),
        ({"experts_per_token": 129}, "experts_per_token: must be at most experts, 128, not 129"),
        ({"expert_parameters": 31}, "expert_parameters must be at most parameters, 30.5 billion"),
        ({"attention": 2}, "expert_parameters and attention must be at most parameters, 30.5 billion"),
        ({"active": 1}, "active: must be at least the experts of a token, 1.81 billion, not 1"),
    ],
)
def test_experts_that_contradict_each_other_are_refused_by_field(change: dict[str, Any], problem: str) -> None:
    entry = catalogue("models")["qwen3-30b-a3b"] | change
    with pytest.raises(InvalidRequest, match=problem):
        model_spec(Model("m", **entry), "model")


def test_active_parameters_follow_from_the_experts_where_they_are_not_given() -> None:
    entry = {name: value for name, value in catalogue("models")["qwen3-30b-a3b"].items() if name != "active"}
    assert model_spec(Model("m", **entry), "model").active_parameters == pytest.approx(3.32e9, rel=1e-2)


def test_attention_groups_hold_no_copies_of_kv() -> None:
    """R1 at TP=8 has eight copies of its KV, and with DP attention none: eight times the KV in the room that is left by
    attention weights on each GPU."""
    runtime = Runtime()
    room = 141e9 * runtime.memory_share - runtime.activation_bytes - 671e9 / 8
    plain, groups = (fit(R1, shape, cluster(), runtime, 1).kv_tokens for shape in (PLAIN, ATTENTION))
    assert plain == pytest.approx(room / R1.kv_bytes_per_token, rel=1e-6)
    left = room - R1.attention_parameters * 7 / 8
    assert groups == pytest.approx(8 * left / R1.kv_bytes_per_token, rel=1e-6)
    assert 6 < groups / plain < 8
    assert fit(R1, WIDE, cluster(), runtime, 1).kv_tokens == groups  # experts take the same memory whole or sliced


def test_the_longest_request_fits_one_attention_group() -> None:
    site = Site(cluster("h200", 2), ("only",), (R1,))
    for shape in (ATTENTION, ReplicaShape(8, 2, attn_dp=8)):
        replica = present(site.replica(0, shape, 1)[0])
        longest = replica.request_tokens
        assert longest == pytest.approx(replica.kv_tokens / 8 / shape.pp, abs=16)
        assert site.replica(0, shape, longest)[0] == replica
        assert "on each of 8 attention groups has KV for" in site.replica(0, shape, longest + 17)[1]
        work = Workload(np.zeros(2), np.array([longest - 9] * 2), np.array([10] * 2))
        with pytest.raises(InvalidRequest, match="DP attention has KV for"):
            serve(work, [replica])
        assert not LatencyTable(work, [replica], Dispatch.CAPACITY, 95.0).can_serve


def test_attention_groups_read_each_request_once_and_their_weights_each() -> None:
    """Eight times less KV traffic; seven more readings of attention's weights, which slicing does not slow down."""
    plain, groups = (roofline(R1, shape, cluster(link_bytes_per_s=1e18), QUIET) for shape in (PLAIN, ATTENTION))
    sliced = QUIET.efficiency(8)
    assert groups.context_token_s == pytest.approx(plain.context_token_s / 8 * sliced)
    assert groups.pair_s == pytest.approx(plain.pair_s * sliced)
    more = (8 * sliced - 1) * R1.attention_parameters / (0.8 * 4800e9 * 8 * sliced)
    assert groups.base_s(1) - plain.base_s(1) == pytest.approx(more)


def test_the_busiest_gpu_has_no_more_than_is_computed() -> None:
    """Against uniform routing of R1 over 8 GPUs: an upper bound of the mean, at most a third over it."""
    rng = np.random.default_rng(2)
    for tokens in (1, 4, 32, 256):
        drawn = float(np.mean([routed(tokens, 8, rng)[1] for _ in range(200)]))
        assert drawn <= busiest_gpu_load(8 * tokens, 8) < 1.34 * drawn
    assert busiest_gpu_load(8, 1) == 1
    assert busiest_gpu_load(0.001, 8) == 8


def test_experts_that_are_not_sliced_are_as_fast_as_the_busiest_gpu() -> None:
    """Of one token the busiest GPU reads three experts of a layer; of 8,192 its load is 2 % over the mean, and it computes
    at the speed of whole matrices."""
    runtime, far = QUIET, cluster(link_bytes_per_s=1e18)
    whole, sliced = (roofline(R1, shape, far, runtime) for shape in (EXPERTS, PLAIN))
    read_bytes = 17.1e9 + 653.9e9 * 0.82 * busiest_gpu_load(8, 8) * 8 / 256
    assert whole.base_s(1) == pytest.approx(read_bytes / (0.8 * 4800e9 * 8 * 0.82))
    assert whole.base_s(1) > sliced.base_s(1)
    assert whole.base_s(8192) < sliced.base_s(8192)


def test_what_is_sent_between_gpus() -> None:
    """Two all-reduces per layer; DP attention needs one, halved around the MLP; with experts divided as well, a token goes to
    the GPUs of its experts, in FP8, and back in 16 bits."""
    tokens, slow = 8192, cluster(link_bytes_per_s=1e6)  # so slow that nothing else matters
    per_layer = {
        shape: roofline(R1, shape, slow, QUIET).base_s(tokens) * 1e6 / R1.layers
        for shape in (PLAIN, ATTENTION, EXPERTS, WIDE)
    }
    all_reduce = 2 * 7 / 8 * 7168 * 2 * tokens
    gpus = 8 * (1 - (7 / 8) ** 8) * 7 / 8  # of a token's experts, its own left out
    all_to_all = busiest_gpu_load(8 * tokens, 8) * tokens / 8 * gpus * 7168 * (1 + 2)
    expected = (2 * all_reduce, all_reduce, all_reduce + all_to_all, all_to_all)
    assert list(per_layer.values()) == pytest.approx(expected, rel=1e-3)
    assert all_to_all < 0.6 * all_reduce


@pytest.mark.parametrize(
    ("model", "shape", "problem"),
    [
        ("deepseek-r1-671b", ReplicaShape(8, 1, ep=4), "EP=4 must be 1 or TP=8"),
        ("deepseek-r1-671b", ReplicaShape(8, 1, attn_dp=3), "DP attention=3 does not divide TP=8"),
        ("deepseek-r1-671b-awq", EXPERTS, "EP=8: needs weights of 16 bits or FP8"),
        ("llama-3.1-70b", EXPERTS, "EP=8: llama-3.1-70b has no experts"),
    ],
)
def test_shapes_that_no_engine_has_are_refused(model: str, shape: ReplicaShape, problem: str) -> None:
    assert fit(model_of_catalogue(model), shape, cluster(), Runtime(), 1).reason == problem
    odd = dataclasses.replace(R1, experts=20)
    assert fit(odd, EXPERTS, cluster(), Runtime(), 1).reason == "EP=8 does not divide 20 experts"


def test_a_shape_says_how_attention_and_experts_are_divided() -> None:
    assert str(WIDE) == "TP=8, EP=8, DP attention"
    assert str(ReplicaShape(8, 2, "h200", attn_dp=4)) == "TP=8, PP=2, DP attention=4 on h200"
    assert str(PLAIN) == "TP=8"


@pytest.mark.parametrize(
    ("model", "divided"),
    [
        ("llama-3.1-70b", set()),
        ("qwen2.5-3b", set()),  # two KV heads, but a dense model
        ("deepseek-r1-671b-awq", {(1, 8)}),
        ("deepseek-r1-671b", {(1, 8), (8, 1), (8, 8)}),
        ("qwen3-235b-a22b", {(1, 8), (8, 1), (8, 8)}),
    ],
)
def test_only_mixtures_of_experts_are_searched_in_more_shapes(model: str, divided: set[tuple[int, int]]) -> None:
    site = Site(cluster("h200"), ("only",), (model_of_catalogue(model),))
    kinds, _ = replica_kinds(site, 0, 8, 1000)
    shapes = [kind.shape for kind in kinds]
    assert {(shape.ep, shape.attn_dp) for shape in shapes if shape.tp == 8} == divided | {(1, 1)}
    assert len(set(shapes)) == len(shapes)


def test_a_profile_may_be_of_a_divided_replica(tmp_path: Path) -> None:
    """It is found by its shape, whatever the model; a profile without the fields is of a plain one."""
    latency = StepLatencyModel.linear(0.01, 1e-5, 0.0)
    measured = Replica(ReplicaShape(4, 1, ep=2, attn_dp=4), latency, 64_000, EngineLimits())
    path = tmp_path / "profile.json"
    write_profile(path, Profile("m", "sglang", "h200", measured, (), 0.0))
    assert read_profile(path).replica == measured
    site = Site(cluster(), ("only",), (model_of_catalogue("llama-3.1-8b"),), measured=((measured,),))
    assert replica_kinds(site, 0, 8, 16_000) == ([measured], "only has no profile for TP=8")
    assert replica_kinds(site, 0, 8, 16_001)[0] == []
    content = json.loads(path.read_text())
    del content["ep"], content["attn_dp"]
    path.write_text(json.dumps(content))
    assert read_profile(path).replica.shape == ReplicaShape(4, 1)


@pytest.mark.slow
def test_attention_is_divided_where_kv_binds() -> None:
    """DeepSeek R1 on 16 H100: requests of 20,000 tokens fill the KV of a plain replica; single short ones do not, and are
    faster where attention is sliced."""
    kinds, _ = replica_kinds(Site(cluster("h100", 2), ("only",), (R1,)), 0, 16, 21_000)
    long = Workload(np.array(range(150), float), np.full(150, 20_000), np.full(150, 1000))
    short = Workload(np.array(range(0, 2000, 100), float), np.full(20, 200), np.full(20, 100))
    chosen = [LatencyTable(work, kinds, Dispatch.CAPACITY, 95.0).best(16) for work in (long, short)]
    (crowded, _), (alone, _) = present(chosen[0]).replicas[0], present(chosen[1]).replicas[0]
    assert crowded.shape.attn_dp == 8
    assert alone.shape.attn_dp == 1
    plain = [kind for kind in kinds if kind.shape.attn_dp == 1]
    assert LatencyTable(long, plain, Dispatch.CAPACITY, 95.0).latency_s(16) > 1.2 * present(chosen[0]).latency_s
