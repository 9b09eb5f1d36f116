"""What a solver process is told when the workload has drifted. As JSON: it goes from one of our processes to another."""

import json
from dataclasses import asdict, dataclass
from typing import Self

from services.domain.long_answers import LongAnswers
from services.domain.workload import RequestRecord


@dataclass(frozen=True, slots=True)
class ReplanJob:
    """Files as in MeshReplan, paths absolute. records: sampled requests; rate_per_s: of all that arrived.

    staged: names of the tiers that have length stages. Of the current plan, which planning again does not change:
    best_answer, and for the tiers but the last skip_below, long_answers, and least_thresholds, those that early checks were
    fitted to (0 where there are none).
    """

    cluster: str
    models: str
    trace: str
    quality: str
    min_quality: float | None
    max_latency_s: float | None
    gpus: int | None
    requests: int
    seed: int
    rate_per_s: float
    records: tuple[RequestRecord, ...]
    staged: tuple[str, ...] = ()
    skip_below: tuple[float | None, ...] = ()
    least_thresholds: tuple[float, ...] = ()
    long_answers: tuple[LongAnswers | None, ...] = ()
    best_answer: bool = False

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        raw = json.loads(data)
        records = tuple(map(RequestRecord.from_object, raw.pop("records")))
        of_plan = {name: tuple(raw[name]) for name in ("staged", "skip_below", "least_thresholds")}
        long_answers = tuple(None if rule is None else LongAnswers(**rule) for rule in raw["long_answers"])
        return cls(**raw | of_plan | {"records": records, "long_answers": long_answers})
