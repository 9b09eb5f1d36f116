"""What a solver process is told when the workload has drifted. As JSON: it goes from one of our processes to another."""

import json
from dataclasses import asdict, dataclass
from typing import Self

from penstock.services.acceptance.pipeline import NO_RULES
from penstock.services.domain.workload import RequestRecord
from penstock.services.field_problems import from_json
from penstock.types.rules import AcceptanceRules


@dataclass(frozen=True, slots=True)
class ReplanJob:
    """question: path of the file, see MeshReplan. records: sampled requests; rate_per_s: of all that arrived.

    staged: names of the tiers that have length stages. rules: of the current plan, which planning again does not
    change.
    """

    question: str
    rate_per_s: float
    records: tuple[RequestRecord, ...]
    staged: tuple[str, ...] = ()
    rules: AcceptanceRules = NO_RULES

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        return from_json(cls, data)
