"""What a solver process is told when the workload has drifted. As JSON: it goes from one of our processes to another."""

import json
from dataclasses import asdict, dataclass
from typing import Self

from services.domain.workload import RequestRecord, TierVisit


@dataclass(frozen=True, slots=True)
class ReplanJob:
    """Files as in MeshReplan, paths absolute. records: sampled requests; rate_per_s: of all that arrived.

    staged: names of the tiers that have length stages.
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

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        raw = json.loads(data)
        records = tuple(
            RequestRecord(r["arrival_s"], r["input_tokens"], tuple(TierVisit(**v) for v in r["visits"]), r["weight"])
            for r in raw.pop("records")
        )
        return cls(**raw | {"records": records, "staged": tuple(raw["staged"])})
