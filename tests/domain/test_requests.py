"""Requests and plans: every unsound field is named, every sound one passes."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.plans import check_plan
from penstock.types.plans import Plan, TierPlan
from penstock.types.prompts import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.slo import Slo, SloPhase

SOUND = GenerationRequest("r1", TextPrompt("hello"), SamplingParams())


def fields(request: GenerationRequest) -> set[str]:
    return {problem.field for problem in request.problems()}


def test_a_sound_request_passes() -> None:
    assert not [*SOUND.problems()]
    assert not [*replace(SOUND, prompt=ChatPrompt((ChatMessage("user", ""),)), priority=-5).problems()]


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (SamplingParams(temperature=-0.1), "sampling.temperature"),
        (SamplingParams(temperature=2.1), "sampling.temperature"),
        (SamplingParams(temperature=math.nan), "sampling.temperature"),
        (SamplingParams(top_p=0.0), "sampling.top_p"),
        (SamplingParams(top_p=math.nan), "sampling.top_p"),
        (SamplingParams(top_p=1.5), "sampling.top_p"),
        (SamplingParams(seed=-1), "sampling.seed"),
        (SamplingParams(max_tokens=0), "sampling.max_tokens"),
        (SamplingParams(stop=("a",) * 17), "sampling.stop"),
        (SamplingParams(stop=("a", "")), "sampling.stop[1]"),
        (SamplingParams(top_logprobs=21), "sampling.top_logprobs"),
    ],
)
def test_unsound_sampling_is_named(sampling: SamplingParams, field: str) -> None:
    assert fields(replace(SOUND, sampling=sampling)) == {field}


@pytest.mark.parametrize("temperature", [0.0, -0.0, 5e-324, 1e-300, 1e-38, 1e-10, 9.9e-5])
def test_a_temperature_too_small_to_matter_is_greedy(temperature: float) -> None:
    """Whatever engine answers sees 0: what float32 cannot divide by never reaches one."""
    sampling = SamplingParams(temperature=temperature)
    assert sampling.greedy
    assert math.copysign(1, sampling.temperature or 0.0) == 1
    assert sampling.temperature == 0
    assert not [*replace(SOUND, sampling=sampling).problems()]


@pytest.mark.parametrize("temperature", [1e-4, 0.001, 2.0])
def test_a_temperature_with_a_meaning_is_kept(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature)
    assert not sampling.greedy
    assert sampling.temperature == temperature
    assert not [*replace(SOUND, sampling=sampling).problems()]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"prompt": ChatPrompt((ChatMessage("user", ""),) * 4_097)}, "prompt.chat.messages"),
        ({"prompt": ChatPrompt((ChatMessage("user", "x" * 1_000_001),) * 2)}, "prompt.chat.messages"),
        ({"prompt": TextPrompt("x" * 2_000_001)}, "prompt.text"),
        ({"prompt": TokenPrompt((1,) * 1_000_001)}, "prompt.token_ids.ids"),
        ({"resume_token_ids": (1,) * 1_000_001}, "resume_token_ids"),
        ({"slo": Slo(0.5, tuple(SloPhase(i, 0.1) for i in range(65)))}, "slo.phases"),
    ],
)
def test_what_is_too_much_is_named(changed: dict[str, Any], field: str) -> None:
    assert fields(replace(SOUND, **changed)) == {field}


def test_what_is_just_not_too_much_passes() -> None:
    assert not [*replace(SOUND, prompt=ChatPrompt((ChatMessage("user", ""),) * 4_096)).problems()]
    assert not [*replace(SOUND, prompt=TextPrompt("x" * 2_000_000)).problems()]
    assert not [*replace(SOUND, prompt=TokenPrompt((1,) * 1_000_000)).problems()]
    assert not [*replace(SOUND, slo=Slo(0.5, tuple(SloPhase(i, 0.1) for i in range(64)))).problems()]


def test_what_is_too_many_is_counted_and_not_walked() -> None:
    """The messages here cannot be read at all: only their number can."""

    class Unreadable(tuple[ChatMessage, ...]):
        def __iter__(self) -> Iterator[ChatMessage]:
            raise AssertionError("walked")

    messages = Unreadable((ChatMessage("nobody", ""),) * 1_000_000)
    assert fields(replace(SOUND, prompt=ChatPrompt(messages))) == {"prompt.chat.messages"}


def test_all_problems_are_told_at_once() -> None:
    request = replace(
        SOUND,
        request_id="",
        prompt=ChatPrompt((ChatMessage("robot", "x"),)),
        slo=Slo(0.0, (SloPhase(5, 0.1), SloPhase(5, 0.0))),
    )
    assert fields(request) == {
        "request_id",
        "prompt.chat.messages[0].role",
        "slo.time_to_first_token",
        "slo.phases[1].from_output_token_count",
        "slo.phases[1].time_per_output_token",
    }


@pytest.mark.parametrize("prompt", [ChatPrompt(()), TextPrompt(""), TokenPrompt(())])
def test_an_empty_prompt_is_refused(prompt: ChatPrompt | TextPrompt | TokenPrompt) -> None:
    assert len(fields(replace(SOUND, prompt=prompt))) == 1


@given(st.floats(), st.floats(), st.integers(-(2**70), 2**70))
def test_validation_never_fails_otherwise(temperature: float, top_p: float, seed: int) -> None:
    """Whatever the numbers, the answer is yes or the name of a field."""
    request = replace(SOUND, sampling=SamplingParams(temperature, top_p, seed))
    sound = 0 <= temperature <= 2 and 0 < top_p <= 1 and 0 <= seed < 2**63
    assert bool(fields(request)) is not sound


def plan(*thresholds: float | None) -> Plan:
    return Plan(0, tuple(TierPlan(f"t{i}", "m", threshold, 1) for i, threshold in enumerate(thresholds)))


def test_a_plan_needs_thresholds_on_all_tiers_but_the_last() -> None:
    check_plan(plan(50, 60.5, None))
    check_plan(plan(None))
    for bad, field in (
        (plan(), "plan.tiers"),
        (plan(50, 50), "plan.tiers[1].threshold"),
        (plan(None, None), "plan.tiers[0].threshold"),
        (plan(101, None), "plan.tiers[0].threshold"),
        (plan(math.nan, None), "plan.tiers[0].threshold"),
        (Plan(0, (TierPlan("a", "m", 1, 1), TierPlan("a", "m", None, 1))), "plan.tiers[1].name"),
        (Plan(0, (TierPlan("cascade", "m", None, 1),)), "plan.tiers[0].name"),
        (Plan(0, (TierPlan("A b", "m", None, 1),)), "plan.tiers[0].name"),
        (Plan(0, (TierPlan("a", "m", None, -1),)), "plan.tiers[0].instances"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            check_plan(bad)
        assert [p.field for p in caught.value.problems] == [field]
