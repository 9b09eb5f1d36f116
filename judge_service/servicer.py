"""JudgeService over a registry of scorers."""

import time
from collections.abc import Collection

from opentelemetry import trace

from penstock.judge_service.scoring.registry import ScorerRegistry
from penstock.mapper import to_message
from penstock.proto.judge.v1 import judge_pb2 as pb
from penstock.proto.judge.v1 import judge_pb2_grpc
from penstock.services.domain.errors import DeadlineExceeded, Overloaded
from penstock.services.grpc_types import Context
from penstock.services.proto_codec import check_calls, checked
from penstock.services.telemetry import Telemetry
from penstock.types.judging import MAX_ITEMS, ScoreRequest

SERVICE = pb.DESCRIPTOR.services_by_name["JudgeService"].full_name
UNKNOWN_TIER = "unknown"


class JudgeServicer(judge_pb2_grpc.JudgeServiceServicer):
    def __init__(self, registry: ScorerRegistry, measured: Telemetry, tiers: Collection[str]) -> None:
        """tiers: tier names allowed in metrics; others are counted as UNKNOWN_TIER."""
        self._registry, self._tiers = registry, frozenset(tiers)
        self._time = measured.meter.create_histogram("penstock.judge.duration", unit="s")
        self._unjudged = measured.meter.create_counter(
            "penstock.judge.unjudged",
            unit="{answer}",
            description="Answers that were refused or not scored in time, by reason.",
        )
        self._scores = measured.meter.create_histogram("penstock.judge.score", unit="1")

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        for i, item in enumerate(request.items[:MAX_ITEMS]):
            check_calls(item.prompt, f"items[{i}].prompt")
        answers = checked(request, ScoreRequest).items
        began = time.monotonic()
        try:
            scorer, results = await self._registry.judge(request.scorer, answers, context.time_remaining())
        except (Overloaded, DeadlineExceeded) as error:
            self._unjudged.add(len(answers), {"penstock.scorer": request.scorer, "error.type": error.reason})
            raise
        labels = {"penstock.scorer": scorer}
        self._time.record(time.monotonic() - began, labels)
        for result, answer in zip(results, answers, strict=True):
            tier = answer.tier if answer.tier in self._tiers else UNKNOWN_TIER
            self._scores.record(result.score, labels | {"penstock.tier": tier})
        scores = [round(result.score, 1) for result in results]
        trace.get_current_span().set_attributes({"penstock.scorer": scorer, "penstock.scores": scores})
        return pb.ScoreResponse(
            results=[to_message(result, pb.ScoreResult) for result in results],
            scorer=scorer,
            uncalibrated=not self._registry.is_calibrated(scorer),
        )

    async def ListScorers(self, request: pb.ListScorersRequest, context: Context) -> pb.ListScorersResponse:
        scorers = [to_message(scorer.info, pb.ScorerInfo) for scorer in self._registry.scorers]
        return pb.ListScorersResponse(scorers=scorers, default_scorer=self._registry.default)
