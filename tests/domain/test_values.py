"""Value types that are created often."""

import dataclasses
from typing import Any

import pytest

from penstock.router_service.domain.events import RouterRequest
from penstock.types.events import Finished
from penstock.types.prompts import TextPrompt
from penstock.types.replies import FinishReason, TokenFrame, Usage
from penstock.types.sampling import SamplingParams
from penstock.types.values import replaced, value_type


def test_value_types_compare_and_hash_as_frozen_dataclasses_do() -> None:
    """By all fields: they are keys of dicts and members of sets."""
    assert TokenFrame(0, (1, 2), "ab") == TokenFrame(0, (1, 2), "ab")
    assert hash(TokenFrame(0, (1, 2), "ab")) == hash(TokenFrame(0, (1, 2), "ab"))
    assert TokenFrame(0, (1, 2), "ab") != TokenFrame(1, (1, 2), "ab")
    assert not hasattr(TokenFrame(0, (), ""), "__dict__")


def test_a_copy_has_all_other_fields() -> None:
    """As `dataclasses.replace` has it, for every field."""
    request = RouterRequest("r", "only", TextPrompt("hello"), SamplingParams(temperature=0.5, top_k=3, min_p=0.1), 7.0)
    for field in dataclasses.fields(SamplingParams):
        value: Any = {"temperature": 1.5, "unset": frozenset({"top_p"})}.get(field.name, 5)
        expected = dataclasses.replace(request.sampling, **{field.name: value})
        assert replaced(request.sampling, **{field.name: value}) == expected
    assert replaced(request, model="large", priority=2) == dataclasses.replace(request, model="large", priority=2)


def test_a_copy_is_checked_as_a_new_value_is() -> None:
    assert replaced(SamplingParams(), temperature=1e-9).greedy


def test_a_field_that_does_not_exist_is_refused() -> None:
    finished = Finished(FinishReason.STOP, "only", Usage(), (), None, 0.1, "")
    with pytest.raises(TypeError, match="Finished has no field tears"):
        replaced(finished, tears=1)


@pytest.mark.parametrize("options", [{"frozen": False, "slots": True}, {"frozen": True, "slots": False}])
def test_a_value_type_is_frozen_and_has_slots(options: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match="must be True"):
        value_type(**options)
