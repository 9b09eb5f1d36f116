"""Workers of a tier as one router sees them: scripted, called as routers call them."""

import asyncio
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from opentelemetry.context import Context
from opentelemetry.metrics import NoOpMeter
from opentelemetry.trace import NoOpTracer, Tracer

from penstock.router_service.clients.reply_multiplexer import MultiplexerPool
from penstock.router_service.clients.worker_client import WorkerClient
from penstock.router_service.domain.failures import FailureHistory
from penstock.router_service.generation.reply_assembler import TierEvent
from penstock.router_service.generation.tier_generation import TierGeneration
from penstock.router_service.migration.bidding import MoveAgent
from penstock.router_service.routing.instance_pool import InstancePool
from penstock.services.channels import ChannelPool
from penstock.services.domain.mesh_view import MeshView
from penstock.services.mesh_schema.router import MeshRouter
from penstock.services.mesh_schema.slo import MeshSlo
from penstock.services.mesh_schema.stages import MeshStages
from penstock.types.events import InstanceChanged, TierStarted
from penstock.types.prompts import TextPrompt
from penstock.types.requests import Draft, GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.workers import EngineFinished
from tests.support.scripted_worker_servicer import Script, ScriptedWorker

TOKENS = 40
LONG_AGO = -1e9
NO_HOPS = MeshSlo(max_hops=0)


@dataclass
class Seen:
    token_ids: list[int]
    instances: list[str]
    done: EngineFinished
    reasons: list[str]
    """Of the changes of instance."""


class Scene:
    """Workers by name, least loaded first, as one router sees them."""

    def __init__(self, stack: AsyncExitStack, channels: ChannelPool, sessions: MultiplexerPool) -> None:
        self._stack, self.channels, self._sessions = stack, channels, sessions
        self.view = MeshView()
        self.view.connect([], None, LONG_AGO)
        self.pool = InstancePool(self.view, ejection_s=1000.0)
        self.policy = MeshRouter(tier_wait_s=0.0, max_attempts=4, max_refusals=4, max_deaths=2)
        self.workers: dict[str, ScriptedWorker] = {}
        self._version = 0
        self.received: dict[str, list[int]] = {}

    async def start(self, name: str, *scripts: Script, tier: str = "only") -> ScriptedWorker:
        worker = ScriptedWorker(  # type: ignore[abstract]  # it serves what routers call here, no more
            name, deque(scripts), requests=len(self.workers), tier=tier, received=self._tokens_of
        )
        self.workers[name] = await self._stack.enter_async_context(worker.serving())
        self.hear(worker)
        return worker

    def _tokens_of(self, try_id: str) -> int:
        return len(self.received[try_id.partition(":")[0]])

    def hear(self, worker: ScriptedWorker, **changes: object) -> None:
        self._version += 1
        record = replace(worker.record, sequence=self._version, **changes)  # type: ignore[arg-type]
        self.view.hear(record, asyncio.get_running_loop().time())
        self.pool.view_changed()

    def tier(self, silence_s: float = 30.0, tracer: Tracer | None = None, hops: MeshSlo = NO_HOPS) -> TierGeneration:
        client = WorkerClient(self.channels, self._sessions, silence_s)
        agent = MoveAgent(
            self.view,
            client,
            NoOpTracer(),
            NoOpMeter("t"),
            MeshStages(bid_timeout_s=1.0, turn_timeout_s=1.0),
        )
        return TierGeneration(self.pool, client, agent, tracer or NoOpTracer(), self.policy, NoOpMeter("t"), hops)

    async def reply(
        self,
        request_id: str = "r",
        *,
        tier: str = "only",
        may_give_up: bool = False,
        history: FailureHistory | None = None,
        silence_s: float = 30.0,
        generation: TierGeneration | None = None,
        parent: Context | None = None,
        draft: Draft | None = None,
        within_s: float = 300.0,
    ) -> Seen:
        """A whole reply, each of its tokens once."""
        token_ids, instances, reasons = list[int](), list[str](), list[str]()
        self.received[request_id] = token_ids
        sampling = SamplingParams(seed=1, max_tokens=TOKENS)
        # no prompt is known anywhere
        request = GenerationRequest(request_id, TextPrompt(request_id), sampling, draft=draft)
        deadline_s = asyncio.get_running_loop().time() + within_s

        def on_event(event: TierEvent) -> None:
            match event:
                case TierStarted():
                    instances.append(event.instance_id)
                case InstanceChanged():
                    assert event.offset == len(token_ids)
                    instances.append(event.to_instance_id)
                    reasons.append(event.reason)

        done = await (generation or self.tier(silence_s)).generate(
            tier,
            request,
            deadline_s,
            parent if parent is not None else Context(),
            on_event=on_event,
            on_tokens=lambda frame: token_ids.extend(frame.token_ids),
            may_give_up=may_give_up,
            history=history or FailureHistory(),
            promise=None,
        )
        assert token_ids == list(range(TOKENS)), "each token once"
        return Seen(token_ids, instances, done, reasons)

    @property
    def tried(self) -> dict[str, int]:
        return {name: len(worker.asked) for name, worker in self.workers.items()}

    @property
    def ejected(self) -> set[str]:
        return {name for name in self.workers if self.pool.is_ejected(name)}
