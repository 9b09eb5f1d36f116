"""One request through its route: scripted workers and judges, called for real."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from grpc import aio
from opentelemetry.metrics import NoOpMeter
from opentelemetry.trace import NoOpTracer, Tracer

from penstock.proto.judge.v1 import judge_pb2, judge_pb2_grpc
from penstock.router_service.clients.judge_client import JudgeClient
from penstock.router_service.domain.events import RouterEvent, RouterRequest
from penstock.router_service.generation.cascade_generation import CascadeGeneration
from penstock.router_service.generation.tier_answer import TierAnswer
from penstock.router_service.routing.waiting_price import WaitingPrice
from penstock.services.domain.errors import invalid
from penstock.services.domain.instances import InstanceRecord, Role
from penstock.services.domain.score_prediction import ScorePredictor
from penstock.services.errors import to_status
from penstock.services.grpc_types import Context
from penstock.services.mesh_schema.router import MeshRouter
from penstock.types.events import Judged
from penstock.types.plans import Plan, TierPlan
from penstock.types.prompts import ChatMessage, ChatPrompt
from penstock.types.replies import TokenFrame
from penstock.types.sampling import SamplingParams
from tests.support.scripted_worker_servicer import Script
from tests.support.tier_scene import TOKENS, Scene

LIMIT_S = 60.0
PROMPT = ChatPrompt((ChatMessage("user", "count"),))
TIERS = (TierPlan("small", "m", 90.0, 1), TierPlan("medium", "m", 90.0, 1), TierPlan("large", "m", None, 1))
PLAN = Plan(1, TIERS, best_answer=True)

Score = float | None | Callable[[], Awaitable[float]]


class Judge(judge_pb2_grpc.JudgeServiceServicer):
    """Scores answers by their tiers; None: this answer cannot be judged. reasons: of guards, by tier."""

    def __init__(self, scores: dict[str, Score]) -> None:
        self.scores, self.asked, self.needs_logprobs = scores, list[str](), False
        self.reasons: dict[str, str] = {}

    async def Score(self, request: judge_pb2.ScoreRequest, context: Context) -> judge_pb2.ScoreResponse:  # noqa: N802
        tier = request.items[0].tier
        self.asked.append(tier)
        score = self.scores[tier]
        if score is None:
            await context.abort_with_status(to_status(invalid("items[0]", "cannot be judged")))
            raise AssertionError
        value = await score() if callable(score) else score
        result = judge_pb2.ScoreResult(score=value, reason=self.reasons.get(tier, ""))
        return judge_pb2.ScoreResponse(results=[result], scorer="s")

    async def ListScorers(  # noqa: N802
        self, request: judge_pb2.ListScorersRequest, context: Context
    ) -> judge_pb2.ListScorersResponse:
        scorer = judge_pb2.ScorerInfo(name="s", needs_logprobs=self.needs_logprobs)
        return judge_pb2.ListScorersResponse(scorers=[scorer], default_scorer="s")


@dataclass
class Output:
    """What the client gets, in order; tokens by the tier that they are of."""

    events: list[RouterEvent | tuple[str, int]] = field(default_factory=list)

    def event(self, event: RouterEvent) -> None:
        self.events.append(event)

    def answer(self, tier: str, frame: TokenFrame) -> None:
        self.events += [(tier, token) for token in frame.token_ids]

    async def sent(self) -> None:
        pass

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def tokens(self) -> list[tuple[str, int]]:
        return self.of(tuple)


@dataclass
class Served:
    """A request after its end. answer: the one that was delivered."""

    answer: TierAnswer
    answers: list[TierAnswer]
    output: Output
    judge: Judge

    @property
    def verdicts(self) -> list[tuple[str, float | None, bool, str]]:
        return [(e.tier, e.score, e.accepted, e.better_tier) for e in self.output.of(Judged)]


class Router:
    """Scripted workers of three tiers, a scripted judge, and the part of a router that serves one request."""

    def __init__(self, scene: Scene, stack: AsyncExitStack) -> None:
        self.scene, self._stack = scene, stack
        self.answers, self.output = list[TierAnswer](), Output()

    async def start(self, *tiers: str, scripts: Mapping[str, Script] = MappingProxyType({})) -> None:
        for tier in tiers:
            await self.scene.start(tier, *([scripts[tier]] if tier in scripts else []), tier=tier)

    async def judge(self, scores: dict[str, Score]) -> Judge:
        server, judge = aio.server(), Judge(scores)
        judge_pb2_grpc.add_JudgeServiceServicer_to_server(judge, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._stack.push_async_callback(server.stop, None)
        record = InstanceRecord("judge", Role.JUDGE, f"127.0.0.1:{port}", 1.0, 1, 3600.0)
        self.scene.view.hear(record, asyncio.get_running_loop().time())
        return judge

    async def serve(
        self,
        scores: dict[str, Score],
        plan: Plan | None = PLAN,
        *,
        started: Sequence[str] = ("small", "medium", "large"),
        scripts: Mapping[str, Script] = MappingProxyType({}),
        reasons: dict[str, str] | None = None,
        flag_below: float | None = None,
        within_s: float = LIMIT_S,
        tracer: Tracer | None = None,
        needs_logprobs: bool = False,
        predictor: ScorePredictor | None = None,
        waiting: WaitingPrice | None = None,
        **request: Any,
    ) -> Served:
        """One request. scripts: of workers, by tier. reasons, needs_logprobs: of the judge. request: fields of it."""
        await self.start(*started, scripts=scripts)
        judge = await self.judge(scores)
        judge.reasons, judge.needs_logprobs = reasons or {}, needs_logprobs
        if plan is not None:
            self.scene.view.follow(plan)
        client = JudgeClient(
            self.scene.channels,
            self.scene.pool,
            NoOpTracer(),
            NoOpMeter("t"),
            MeshRouter(judge_timeout_s=LIMIT_S, judge_concurrency=8, judge_open_s=LIMIT_S),
        )
        cascade = CascadeGeneration(
            self.scene.view,
            self.scene.tier(),
            client,
            tracer or NoOpTracer(),
            flag_below=flag_below,
            predictor=predictor,
            waiting=waiting,
        )
        sampling = SamplingParams(seed=1, max_tokens=TOKENS)
        deadline_s = asyncio.get_running_loop().time() + within_s
        fields: dict[str, Any] = {"model": "cascade", "prompt": PROMPT} | request
        routed = RouterRequest("r", sampling=sampling, deadline_s=deadline_s, **fields)
        answer = await cascade.generate(routed, self.output, self.answers)
        return Served(answer, self.answers, self.output, judge)


def all_tokens(tier: str, begin: int = 0) -> list[tuple[str, int]]:
    return [(tier, token) for token in range(begin, TOKENS)]
