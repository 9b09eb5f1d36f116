"""Requests with an SLO from every API to the workers and back: classes, results, counters, and errors that name the field."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from penstock import (
    AsyncClient,
    Escalated,
    Finished,
    FinishReason,
    InvalidRequestError,
    Slo,
    SloPhase,
    SloResult,
    TierAdmitted,
    TierDeclined,
    TierStarted,
)
from penstock.mapper import to_message
from penstock.proto.common.v1 import common_pb2
from penstock.types.slo import SloClass
from tests.support.mesh import TestMesh

HELLO: Any = [{"role": "user", "content": "hello"}]
IMPOSSIBLE = Slo(0.001, time_per_output_token_s=1e-5)
EASY = Slo(500.0, time_per_output_token_s=50.0)
MESH = {
    "tiers": [
        {"name": "small", "model": "sim-s", "threshold": 95, "batch_policy": "slo"},
        {"name": "large", "model": "sim-l", "workers": 2, "batch_policy": "slo"},
    ],
    "slo": {
        "classes": {
            "interactive": {"time_to_first_token_s": 400.0, "time_per_output_token_s": 40.0},
            "strict": {"time_to_first_token_s": 0.001, "time_per_output_token_s": 1e-5, "fallback": "decline"},
            "batch": {},
        }
    },
}
"""A cascade whose large tier has two workers; both tiers keep SLOs."""


@pytest.fixture
async def client(mesh: TestMesh) -> AsyncIterator[AsyncClient]:
    async with mesh.client() as made:
        yield made


async def events_of(client: AsyncClient, slo: Slo, model: str = "large") -> list[Any]:
    return [event async for event in client.stream("hello", model=model, temperature=0, slo=slo)]


def of(events: list[Any], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


async def test_a_kept_slo_is_announced_and_its_attainment_reported(client: AsyncClient) -> None:
    for slo in (EASY, Slo(name="interactive")):
        events = await events_of(client, slo)
        assert [(event.slo_kept, event.slo_class) for event in of(events, TierAdmitted)] == [(True, "standard")]
        (finished,) = of(events, Finished)
        assert finished.slo == SloResult(SloClass.STANDARD, True, 0.0, finished.slo.windows, 0)
        assert finished.slo.windows > 0
    assert (await client.generate("hello", model="large", slo=EASY)).slo is not None
    assert (await client.generate("hello", model="large")).slo is None


async def test_what_no_worker_can_keep_is_best_effort_behind_a_decline(client: AsyncClient) -> None:
    events = await events_of(client, IMPOSSIBLE)
    (declined,) = of(events, TierDeclined)
    (admitted,) = of(events, TierAdmitted)
    assert declined.instance_id != admitted.instance_id, "the other replica was tried"
    assert admitted.slo_class == "best_effort"
    (finished,) = of(events, Finished)
    assert finished.reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert finished.slo.slo_class == "best_effort"
    assert not finished.slo.attained
    assert len(of(events, TierStarted)) == 1


@pytest.mark.parametrize(
    "slo", [Slo(name="strict"), Slo(0.001, time_per_output_token_s=1e-5, fallback="decline")], ids=["class", "own"]
)
async def test_or_declined_if_the_request_or_its_class_says_so(client: AsyncClient, slo: Slo) -> None:
    events = await events_of(client, slo)
    assert len({event.instance_id for event in of(events, TierDeclined)}) == 2
    assert not of(events, TierStarted)
    (finished,) = of(events, Finished)
    assert finished.reason is FinishReason.DECLINED
    assert finished.slo == SloResult(None, False, None)
    assert finished.usage.output_tokens == 0


async def test_a_class_without_objectives_is_best_effort(client: AsyncClient) -> None:
    events = await events_of(client, Slo(name="batch"))
    assert [event.slo_class for event in of(events, TierAdmitted)] == ["best_effort"]
    assert of(events, Finished)[0].slo.attained


async def test_in_a_cascade_only_the_streamed_tier_has_a_pace_and_a_declining_tier_is_skipped(
    client: AsyncClient,
) -> None:
    events = await events_of(client, EASY, "cascade")
    assert [event.tier for event in of(events, TierAdmitted)] == ["small", "large"]
    assert [event.reason for event in of(events, Escalated)] == ["score_below_threshold"]
    assert of(events, Finished)[0].slo.attained
    skipped = await events_of(client, IMPOSSIBLE, "cascade")
    assert next(event.reason for event in of(skipped, Escalated)) in ("too_late", "slo_declined")
    assert [event.tier for event in of(skipped, TierAdmitted)] == ["large"]
    assert of(skipped, Finished)[0].slo.slo_class == "best_effort"


async def test_a_tier_that_would_be_too_late_is_skipped_with_an_event(client: AsyncClient) -> None:
    """Its replies have taken longer than the whole budget: it is not even tried."""
    for _ in range(3):
        await events_of(client, EASY, "cascade")
    events = await events_of(client, Slo(0.002), "cascade")
    assert [(event.from_tier, event.to_tier, event.reason) for event in of(events, Escalated)] == [
        ("small", "large", "too_late")
    ]
    assert "small" not in [event.tier for event in of(events, TierStarted)]


async def test_requests_with_an_slo_are_counted_by_how_they_were_served(mesh: TestMesh, client: AsyncClient) -> None:
    before = (await client.status()).slo
    await events_of(client, EASY)
    await events_of(client, IMPOSSIBLE)
    await events_of(client, Slo(name="strict"))
    after = (await client.status()).slo
    assert (after.attained, after.best_effort, after.declined) == (
        before.attained + 1,
        before.best_effort + 1,
        before.declined + 1,
    )
    assert after.broken == before.broken


@pytest.mark.parametrize(
    ("slo", "field"),
    [
        (Slo(0.0), "slo.time_to_first_token"),
        (Slo(time_per_output_token_s=0.0), "slo.phases[0].time_per_output_token"),
        (Slo(1.0, name="interactive"), "slo.name"),
        (Slo(name="nothing"), "slo.name"),
        (Slo(name="x" * 65), "slo.name"),
        (Slo(phases=(SloPhase(0, 1.0), SloPhase(0, 1.0))), "slo.phases[1].from_output_token_count"),
        (Slo(phases=(SloPhase(5, 1.0, "x"),)), "slo.phases[0].after_marker"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_bad_values_name_the_field(client: AsyncClient, slo: Slo, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await client.generate("hello", slo=slo)
    assert [*caught.value.fields] == [field]


def test_the_sdk_refuses_what_it_cannot_send() -> None:
    with pytest.raises(ValueError, match="fallback"):
        to_message(Slo(1.0, fallback="never"), common_pb2.Slo)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"slo\.phases"):
        Slo(phases=(SloPhase(0, 1.0),), time_per_output_token_s=1.0)


@pytest.fixture
async def http(mesh: TestMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.http}/v1", api_key="unused", max_retries=2) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
async def test_the_openai_api_takes_a_class_or_objectives(http: openai.AsyncOpenAI, stream: bool) -> None:
    for slo in ("interactive", {"time_to_first_token_s": 500, "time_per_output_token_s": 50}):
        reply: Any = await http.chat.completions.create(
            model="large", messages=HELLO, stream=stream, extra_body={"slo": slo}
        )
        if stream:
            chunks = [chunk async for chunk in reply]
            result = next(c.model_extra["penstock"] for c in chunks if "penstock" in (c.model_extra or {}))
        else:
            result = reply.model_extra["penstock"]
        assert result["slo"]["class"] == "standard"
        assert result["slo"]["attained"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_declined_request_is_429_there_and_not_tried_again(
    mesh: TestMesh, http: openai.AsyncOpenAI, client: AsyncClient, stream: bool
) -> None:
    before = (await client.status()).slo.declined
    with pytest.raises(openai.RateLimitError) as caught:
        await http.chat.completions.create(model="large", messages=HELLO, stream=stream, extra_body={"slo": "strict"})
    assert caught.value.code == "slo_declined"
    assert (await client.status()).slo.declined == before + 1, "the client's own retries did not follow"


@pytest.mark.parametrize(
    ("slo", "field"),
    [
        ("nothing", "slo"),
        ("", "slo"),
        ({"time_to_first_token_s": 0}, "slo.time_to_first_token_s"),
        ({"time_per_output_token_s": 1e300}, "slo.time_per_output_token_s"),
        ({"time_to_first_token_s": 1e-12}, "slo.time_to_first_token_s"),
        ({"time_per_output_token_s": -1}, "slo.time_per_output_token_s"),
        ({"fallback": "never"}, "slo.fallback"),
        ({"unknown": 1}, "slo.unknown"),
        ({"phases": [{"time_per_output_token_s": 1.0}], "time_per_output_token_s": 1.0}, "slo.phases"),
        (
            {"phases": [{"time_per_output_token_s": 1.0}, {"time_per_output_token_s": 1.0}]},
            "slo.phases[1].from_output_token",
        ),
    ],
    ids=str,
)
async def test_bad_values_name_the_field_there(http: openai.AsyncOpenAI, slo: Any, field: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await http.chat.completions.create(model="large", messages=HELLO, extra_body={"slo": slo})
    assert caught.value.param == field
