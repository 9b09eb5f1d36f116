"""Memory and step times of models on GPUs."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner_service.files.catalogue import catalogue
from penstock.planner_service.files.hardware import gpu_of_catalogue, gpu_spec, model_of_catalogue, model_spec
from penstock.planner_service.question.site import Site
from penstock.planner_service.question.step_times import step_times
from penstock.planner_service.simulator import Replica
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import Arithmetic, ClusterSpec, ModelSpec, ReplicaShape, Runtime, fit, roofline
from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.types.planned import StepTimes
from penstock.types.planning import Gpu, Model


def cluster(gpu: str = "h100", nodes: int = 4) -> ClusterSpec:
    return ClusterSpec(gpu_of_catalogue(gpu), nodes, 8, 50e9)


def model(name: str) -> ModelSpec:
    return model_of_catalogue(name)


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1)), min_size=2, max_size=8), st.integers(1, 4000))
def test_base_passes_through_its_knots_and_is_linear_between(parts: list[tuple[int, float]], tokens: int) -> None:
    places = [float(sum(step for step, _ in parts[: i + 1])) for i in range(len(parts))]
    made = StepLatencyModel(tuple(places), tuple(y for _, y in parts))
    for x, (_, y) in zip(places, parts, strict=True):
        assert made.base_s(x) == pytest.approx(y)
    middle = (places[0] + places[1]) / 2
    assert made.base_s(middle) == pytest.approx((parts[0][1] + parts[1][1]) / 2)
    assert made.base_s(tokens) >= 0


def test_every_part_of_a_step_counts() -> None:
    made = StepLatencyModel((1.0, 2.0), (1.0, 2.0), 0.1, 0.01, 0.001)
    assert made.step_s(StepLoad(2, 30, 400.0, 5000)) == pytest.approx(2 + 3 + 4 + 5)
    assert made.step_s(StepLoad(0, 0)) == 0
    assert StepLatencyModel.linear(0.5, 0.1, 0.0).step_s(StepLoad(10, 0)) == pytest.approx(1.5)


def test_unsound_models_are_refused_by_field() -> None:
    with pytest.raises(InvalidRequest, match="knot_s"):
        StepLatencyModel((1.0, 2.0), (1.0,))
    with pytest.raises(InvalidRequest, match="ascend"):
        StepLatencyModel((2.0, 1.0), (1.0, 1.0))
    with pytest.raises(InvalidRequest, match="negative"):
        StepLatencyModel((1.0, 2.0), (1.0, 1.0), -1.0)


def test_what_does_not_fit_is_explained() -> None:
    """70 billion 16-bit parameters do not fit one GPU of 80 GB; they fit two, with some room for KV."""
    large, where, runtime = model("llama-3.1-70b"), cluster(), Runtime()
    assert "needs 2 x 80 GB for its weights, has 1" in fit(large, ReplicaShape(1, 1), where, runtime, 100).reason
    assert fit(large, ReplicaShape(4, 1), where, runtime, 100).ok
    assert "KV for" in fit(large, ReplicaShape(4, 1), where, runtime, 10**9).reason
    assert "does not divide 14 heads" in fit(model("qwen2.5-0.5b"), ReplicaShape(4, 1), where, runtime, 1).reason
    assert "exceeds the 8 GPUs" in fit(large, ReplicaShape(16, 1), where, runtime, 1).reason
    assert "exceeds 16 layers" in fit(model("llama-3.2-1b"), ReplicaShape(1, 17), where, runtime, 1).reason


def test_kv_room_is_what_memory_leaves() -> None:
    small, where = model("llama-3.1-8b"), cluster()
    runtime = Runtime(memory_share=1.0, activation_bytes=0.0)
    room = fit(small, ReplicaShape(1, 1), where, runtime, 1).kv_tokens
    assert room == pytest.approx((80e9 - 2 * 8.03e9) / (2 * 2 * 8 * 128 * 32), rel=1e-6)
    two = fit(small, ReplicaShape(2, 1), where, runtime, 1).kv_tokens
    assert two == pytest.approx((160e9 - 2 * 8.03e9) / (2 * 2 * 8 * 128 * 32), rel=1e-6)


def test_a_decode_step_takes_the_reading_of_the_weights() -> None:
    """One token of an 8B model on an H100: 16 GB at 80 % of 3.35 TB/s, some 6 ms; about what is measured there."""
    step = roofline(model("llama-3.1-8b"), ReplicaShape(1, 1), cluster(), Runtime(step_overhead_s=0.0))
    assert step.base_s(1) == pytest.approx(16.06e9 / (0.8 * 3350e9), rel=0.01)
    assert step.base_s(2048) == pytest.approx(2 * 8.03e9 * 2048 / (0.6 * 989e12), rel=0.01)
    assert step.base_s(1) == pytest.approx(step.base_s(32), rel=0.01)  # memory-bound: a batch is nearly free


def base_s(name: str, gpu: str, tokens: int) -> float:
    return roofline(model(name), ReplicaShape(1, 1), cluster(gpu), Runtime(step_overhead_s=0.0)).base_s(tokens)


def test_fp8_halves_reading_and_arithmetic_where_the_gpu_has_it() -> None:
    """Prefills of 8,192 tokens take the arithmetic of the sheet, decodes the reading of the weights."""
    assert base_s("llama-3.1-8b-fp8", "h100", 8192) == pytest.approx(2 * 8.03e9 * 8192 / (0.6 * 1979e12))
    assert base_s("llama-3.1-8b", "h100", 8192) == pytest.approx(2 * 8.03e9 * 8192 / (0.6 * 989e12))
    assert base_s("llama-3.1-8b-fp8", "h100", 1) == pytest.approx(8.03e9 * 1.131 / (0.8 * 3350e9))
    # an A100 has no FP8: its engine widens the weights, which saves reading and no arithmetic
    assert base_s("llama-3.1-8b-fp8", "a100-80gb", 8192) == base_s("llama-3.1-8b", "a100-80gb", 8192)
    assert base_s("llama-3.1-8b-fp8", "a100-80gb", 1) < 0.6 * base_s("llama-3.1-8b", "a100-80gb", 1)


def test_four_bit_weights_that_are_widened_save_no_arithmetic() -> None:
    awq, fp8 = (model(name) for name in ("deepseek-r1-671b-awq", "deepseek-r1-671b"))
    assert (awq.arithmetic, fp8.arithmetic) == (Arithmetic.BITS_16, Arithmetic.FP8)
    assert base_s("deepseek-r1-671b-awq", "h100", 8192) > 1.9 * base_s("deepseek-r1-671b", "h100", 8192)
    assert base_s("deepseek-r1-671b-awq", "h100", 1) < base_s("deepseek-r1-671b", "h100", 1)


def test_attention_stays_in_16_bits() -> None:
    narrow, wide = (
        roofline(model(name), ReplicaShape(2, 1), cluster(), Runtime())
        for name in ("llama-3.1-70b-fp8", "llama-3.1-70b")
    )
    assert (narrow.pair_s, narrow.context_token_s) == (wide.pair_s, wide.context_token_s)


@pytest.mark.parametrize(
    ("arithmetic", "field", "gpu"),
    [
        ("fp8", "fp8_tflops", "h100"),
        ("int8", "int8_tops", "a100-80gb"),
        ("fp4", "fp4_tflops", "b200"),
        ("int4", "int4_tops", "a100-80gb"),
    ],
)
def test_every_arithmetic_is_computed_at_its_own_peak(arithmetic: str, field: str, gpu: str) -> None:
    sheet = catalogue("gpus")[gpu]
    entry = catalogue("models")["llama-3.1-8b"] | {"arithmetic": arithmetic, "bytes_per_parameter": 0.5}
    spec, runtime = model_spec(Model("narrow", **entry), "model"), Runtime(step_overhead_s=0.0)
    step = roofline(spec, ReplicaShape(1, 1), cluster(gpu), runtime)
    assert step.base_s(8192) == pytest.approx(2 * 8.03e9 * 8192 / (0.6 * sheet[field] * 1e12))
    without = {name: value for name, value in sheet.items() if name != field}
    plain = ClusterSpec(gpu_spec(Gpu(gpu, **without), "gpu"), 1, 8, 50e9)
    assert roofline(spec, ReplicaShape(1, 1), plain, runtime).base_s(8192) == pytest.approx(
        2 * 8.03e9 * 8192 / (0.6 * sheet["tflops"] * 1e12)
    )


def test_a_narrow_arithmetic_needs_what_its_weights_take() -> None:
    shape = catalogue("models")["llama-3.1-8b"]
    with pytest.raises(InvalidRequest, match="bytes_per_parameter"):
        model_spec(Model(**{**shape, "arithmetic": "fp8"}), "model")
    with pytest.raises(InvalidRequest, match="arithmetic"):
        model_spec(Model(**{**shape, "arithmetic": "fp7"}), "model")


def test_where_step_times_are_from_is_said() -> None:
    """An FP8 model on two types of GPU, one of which widens it; a profile of another tier."""
    h100, a100 = (dataclasses.replace(cluster(name), name=name) for name in ("h100", "a100-80gb"))
    measured = Replica(ReplicaShape(1, 1), StepLatencyModel.linear(0.01, 1e-5, 0.0), 4096)
    models = (model("llama-3.1-8b-fp8"), model("llama-3.1-70b"))
    site = Site(h100, ("small", "large"), models, more=(a100,), measured=((), (measured,)))
    both = [ReplicaShape(1, 1, "h100"), ReplicaShape(1, 1, "a100-80gb")]
    assert step_times(site, 0, both) == StepTimes("estimated", "fp8", ("a100-80gb",))
    assert str(step_times(site, 0, both)) == "estimated in fp8, in 16 bits on a100-80gb"
    assert str(step_times(site, 0, both[:1])) == "estimated in fp8"
    assert str(step_times(site, 1, both)) == "profiled"


def test_more_gpus_make_a_step_shorter_but_not_as_much_as_there_are_more() -> None:
    large = model("llama-3.1-70b")
    times = [roofline(large, ReplicaShape(tp, 1), cluster(), Runtime()).base_s(64) for tp in (2, 4, 8)]
    assert times[0] > times[1] > times[2]
    assert times[0] / times[2] < 4
    one, two = (roofline(large, ReplicaShape(4, pp), cluster(), Runtime()).base_s(64) for pp in (1, 2))
    assert two > one  # a token passes all stages, and a hand-over
    assert two == pytest.approx(one, rel=0.02)


def test_the_catalogue_is_sound() -> None:
    gpus, models = catalogue("gpus"), catalogue("models")
    assert {"a100-80gb", "h100", "h200", "h20", "l40s", "a10g"} <= gpus.keys()
    for name in gpus:
        gpu = cluster(name).gpu
        assert gpu.memory_bytes > 1e9
        for arithmetic, peak in gpu.narrow_flops_per_s:  # tensor cores double with each halving of the bits
            doublings = 2 if arithmetic in (Arithmetic.FP4, Arithmetic.INT4) else 1
            assert peak == pytest.approx(gpu.flops_per_s * 2**doublings, rel=0.02), (name, arithmetic)
    for name in models:
        spec = model(name)
        assert spec.active_parameters <= spec.parameters
        assert spec.heads % spec.kv_heads == 0
        dense = 12 * spec.layers * spec.hidden**2
        if spec.active_parameters == spec.parameters:  # a decoder has roughly 12 layers hidden^2 parameters
            assert math.log2(spec.parameters / dense) == pytest.approx(0, abs=1.3), name
