"""Whom the sender's agent asks."""

import pytest

from router_service.migration.bidding import candidates
from services.domain import InstanceRecord, ModelCard, Role
from services.domain.stages.advice import MoveAdvice, MoveReason
from services.domain.stages.places import StagePlace

CARD = ModelCard("only", "m", "d", "torch", 1000, 10, 16, 4)


def worker(name: str, stage: int | None, to: int = 0) -> InstanceRecord:
    place = StagePlace(stage, 0, to) if stage is not None else None
    return InstanceRecord(name, Role.WORKER, "h:1", 1.0, 1, 3.0, model=CARD, place=place)


A, B, C, D = worker("a", 0, 100), worker("b", 0, 100), worker("c", 1, 300), worker("d", 2, 900)
NOWHERE = worker("n", None)


@pytest.mark.parametrize(
    ("reason", "tokens", "sender", "asked"),
    [
        (MoveReason.RANGE_CROSSED, 120, A, [C]),
        (MoveReason.RANGE_CROSSED, 400, A, [D]),
        (MoveReason.RANGE_CROSSED, 5000, C, [D]),
        (MoveReason.RANGE_CROSSED, 5000, D, []),
        (MoveReason.OVERLOADED, 50, A, [B]),
        (MoveReason.OVERLOADED, 50, C, []),
        (MoveReason.DRAINING, 50, A, [B]),
        (MoveReason.DRAINING, 250, C, [D]),
        (MoveReason.DRAINING, 2000, D, [C]),
    ],
)
def test_an_agent_asks_those_whom_the_advice_concerns(
    reason: MoveReason, tokens: int, sender: InstanceRecord, asked: list[InstanceRecord]
) -> None:
    assert candidates([A, B, C, D], sender, MoveAdvice(reason, tokens, tokens)) == asked


def test_without_stages_only_a_drain_has_candidates() -> None:
    others = [NOWHERE, worker("o", None)]
    assert candidates(others, NOWHERE, MoveAdvice(MoveReason.DRAINING, 50, 50)) == [others[1]]
    assert candidates(others, NOWHERE, MoveAdvice(MoveReason.OVERLOADED, 50, 50)) == []
    assert candidates(others, NOWHERE, MoveAdvice(MoveReason.RANGE_CROSSED, 50, 50)) == []
