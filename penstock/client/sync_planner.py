"""The blocking client of the planner, for programs without an event loop. Thread-safe.

Generated from the asyncio client by `scripts/generate_sync.py`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Self

from penstock.client import connection, errors
from penstock.mapper import from_message, to_message
from penstock.proto.planner.v1 import planner_pb2, planner_pb2_grpc
from penstock.types import planned, plans, simulated
from penstock.types.deployments import Deployment
from penstock.types.planning import MeasuredReplica, PlanningQuestion, Trace


class PlannerClient:
    """A client of the planner: reads, sets, watches and computes plans.

    target: `host:port` of the planner's administrative listener. tls: None: without TLS.

    Example:
        >>> with PlannerClient("127.0.0.1:50054") as planner:
        ...     plan = planner.get_plan()
        ...     print([tier.name for tier in plan.tiers])
        ['small', 'large']
    """

    def __init__(self, target: str, *, tls: connection.Tls | None = None) -> None:
        self._channel = connection.channel(target, connection.administrative(tls, "planner"), connection.OPTIONS)
        self._stub: planner_pb2_grpc.PlannerServiceStub = planner_pb2_grpc.PlannerServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def get_plan(self, revision: int | None = None) -> plans.Plan:
        """The plan of a revision, or the current one.

        Raises:
            NotFoundError: There is no such revision.

        Example:
            >>> first = planner.get_plan(revision=1)
            >>> first.source, first.tiers[0].threshold
            ('mesh-file', 50.0)
        """
        with errors.raised_from_rpc():
            response = self._stub.GetPlan(
                planner_pb2.GetPlanRequest(revision=revision), timeout=connection.CALL_TIMEOUT_S
            )
        return from_message(response.plan, plans.Plan)

    def list_plans(self, limit: int | None = None) -> list[plans.Plan]:
        """The last plans, newest first.

        Example:
            >>> plans = planner.list_plans(limit=5)
            >>> plans[0].revision >= plans[-1].revision
            True
        """
        request = planner_pb2.ListPlansRequest(limit_count=limit)
        with errors.raised_from_rpc():
            response = self._stub.ListPlans(request, timeout=connection.CALL_TIMEOUT_S)
        return [from_message(plan, plans.Plan) for plan in response.plans]

    def set_plan(self, plan: plans.Plan, *, expected_revision: int | None = None) -> plans.Plan:
        """Publish a plan; return it with its revision.

        Raises:
            InvalidRequestError: The plan is invalid; `fields` names the problems.
            ConflictError: The current revision is not `expected_revision`.

        Example:
            >>> plan = planner.get_plan()
            >>> small, large = plan.tiers
            >>> stricter = replace(plan, tiers=(replace(small, threshold=60.0), large), note="stricter")
            >>> published = planner.set_plan(stricter, expected_revision=plan.revision)
            >>> published.revision - plan.revision, published.note
            (1, 'stricter')
        """
        request = planner_pb2.SetPlanRequest(
            plan=to_message(plan, planner_pb2.Plan), expected_revision=expected_revision
        )
        with errors.raised_from_rpc():
            response = self._stub.SetPlan(request, timeout=connection.CALL_TIMEOUT_S)
        return from_message(response.plan, plans.Plan)

    def plan_cascade(self, question: PlanningQuestion) -> Iterator[planned.PlanEvent]:
        """Compute a plan without publishing it. Yields progress, then a CascadePlan or Unreachable.

        Leaving the iteration stops the computation. question: built, or of a file, see `load_question`.

        Raises:
            InvalidRequestError: The question is unsound; `fields` names the problems.
            ValueError: The question cannot be sent.

        Example:
            >>> question = load_question("question.yaml", min_quality=75)
            >>> for event in planner.plan_cascade(question):
            ...     if isinstance(event, CascadePlan):
            ...         print(event.quality >= 75)
            True
        """
        request = planner_pb2.PlanCascadeRequest(question=to_message(question, planner_pb2.PlanningQuestion))
        call = self._stub.PlanCascade(request)
        try:
            with errors.raised_from_rpc():
                for response in call:
                    yield from_message(response, planned.PlanEvent)
        finally:
            call.cancel()

    def plan_stages(
        self,
        tier: str,
        *,
        kv_bytes_per_token: float = 0.0,
        bandwidth_bytes_per_s: float = 0.0,
        instances: int | None = None,
        qoe: Sequence[float] = (),
        sequences: Iterable[plans.SequenceInFlight] = (),
        max_tokens: int | None = None,
        trace: Trace | None = None,
        replica: MeasuredReplica | None = None,
        against: Sequence[plans.Stage] = (),
        publish: bool = False,
    ) -> plans.StageLayout:
        """Assign the instances of a tier to length stages, with a trace by replay; `publish` publishes what it favours.

        Defaults: instances and qoe (D0 to D4, seconds) of the current plan, the sequences that the instances hold, their
        context length as max_tokens, the KV of their model, and the bandwidth that they measured.

        trace: of requests of the tier, of which the last 3,000 are replayed on instances like `replica`; what they favour
        also on the 3,000 before.
        against: the layout that a change has to pay against; empty: one stage. publish: as a plan revision; needs a
        trace, and publishes nothing if no change pays.

        Raises:
            InvalidRequestError: The inputs are invalid, or the replay takes more than 10 minutes; `fields` names the
                problems.
            ConflictError: Another plan was published meanwhile.
            ValueError: qoe does not have five coefficients.

        Example:
            >>> running = [SequenceInFlight(100, 150), SequenceInFlight(3000, 3100), SequenceInFlight(200, 260)]
            >>> qoe = (0.005, 1e-5, 1e-8, 0.0, 2e-7)
            >>> layout = planner.plan_stages(
            ...     "large", instances=2, qoe=qoe, sequences=running, max_tokens=4096, kv_bytes_per_token=1e5,
            ...     bandwidth_bytes_per_s=1e9,
            ... )
            >>> sum(stage.instances for stage in layout.stages)
            2
        """
        if qoe and len(qoe) != 5:
            raise ValueError(f"qoe: must be D0 to D4, not {len(qoe)} numbers")
        request = planner_pb2.PlanStagesRequest(
            tier=tier,
            instance_count=instances,
            qoe=to_message(plans.QoeModel(*qoe), planner_pb2.QoeModel) if qoe else None,
            sequences=[to_message(sequence, planner_pb2.SequenceInFlight) for sequence in sequences],
            kv_bytes_per_token=kv_bytes_per_token,
            bandwidth_bytes_per_second=bandwidth_bytes_per_s,
            max_tokens=max_tokens,
            publish=publish,
            trace=to_message(trace, planner_pb2.Trace) if trace is not None else None,
            replica=to_message(replica, planner_pb2.MeasuredReplica) if replica is not None else None,
            against=[to_message(stage, planner_pb2.Stage) for stage in against],
        )
        with errors.raised_from_rpc():
            response = self._stub.PlanStages(request, timeout=connection.DEFAULT_TIMEOUT_S)
        return from_message(response, plans.StageLayout)

    def simulate_deployment(self, question: PlanningQuestion, deployment: Deployment) -> simulated.Simulation:
        """Simulate a deployment on the question's site in virtual time, for 2,000 requests if it does not say how many.

        Raises:
            InvalidRequestError: A field is unsound; `fields` names the problems.
            ValueError: The question or the deployment cannot be sent.

        Example:
            >>> question = load_question("question.yaml", requests=60)
            >>> replicas = (ReplicaGroup(tp=1, pp=1, count=2),)
            >>> deployment = Deployment((DeployedTier(replicas, threshold=60.0), DeployedTier(replicas)))
            >>> simulation = planner.simulate_deployment(question, deployment)
            >>> simulation.end_to_end_s.p95 > 0
            True
        """
        request = planner_pb2.SimulateDeploymentRequest(
            question=to_message(question, planner_pb2.PlanningQuestion),
            deployment=to_message(deployment, planner_pb2.Deployment),
        )
        with errors.raised_from_rpc():
            response = self._stub.SimulateDeployment(request, timeout=connection.DEFAULT_TIMEOUT_S)
        return from_message(response.simulation, simulated.Simulation)

    def watch_plan(self, after_revision: int | None = None) -> Iterator[plans.Plan]:
        """Yield the current plan, then every later one, until the iteration is left.

        Example:
            >>> for plan in planner.watch_plan():
            ...     print(plan.tier("large").instances)
            ...     break
            2
        """
        call = self._stub.WatchPlan(planner_pb2.WatchPlanRequest(after_revision=after_revision))
        try:
            with errors.raised_from_rpc():
                for response in call:
                    yield from_message(response.plan, plans.Plan)
        finally:
            call.cancel()
