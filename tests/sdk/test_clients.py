"""The clients against a real mesh, and against the contract."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator

import pytest

import penstock
from penstock import (
    AsyncClient,
    AsyncPlannerClient,
    Client,
    ConflictError,
    PlannerClient,
    Slo,
    SloPhase,
)
from penstock.proto.planner.v1 import planner_pb2
from penstock.proto.router.v1 import router_pb2
from tests.conftest import MeshFileMaker
from tests.support.mesh import TestMesh, running_mesh
from tests.support.services import RedisProcess


@pytest.fixture
async def mesh(redis: RedisProcess, mesh_file: MeshFileMaker) -> AsyncIterator[TestMesh]:
    async with running_mesh(mesh_file(), redis.url, routers=2) as running:
        yield running


def test_every_rpc_has_a_method_in_both_clients() -> None:
    served = {
        "Generate": "generate",
        "ListModels": "models",
        "GetStatus": "status",
        "WatchStatus": "watch_status",
        "ListTraces": "traces",
        "GetUsage": "usage",
        "ListServedRequests": "served_requests",
        "ListSampledPrompts": "sampled_prompts",
        "MoveReply": "move",
    }
    planned = {
        "GetPlan": "get_plan",
        "SetPlan": "set_plan",
        "WatchPlan": "watch_plan",
        "ListPlans": "list_plans",
        "PlanCascade": "plan_cascade",
        "SimulateDeployment": "simulate_deployment",
        "PlanStages": "plan_stages",
    }
    services = router_pb2.DESCRIPTOR.services_by_name  # RouterProcessService is not served to clients
    router_rpcs = {method.name for name in ("RouterService", "MeshService") for method in services[name].methods}
    planner_rpcs = {m.name for m in planner_pb2.DESCRIPTOR.services_by_name["PlannerService"].methods}
    assert router_rpcs == set(served)
    assert planner_rpcs == set(planned)
    for blocking, asynchronous, names in ((Client, AsyncClient, served), (PlannerClient, AsyncPlannerClient, planned)):
        for name in names.values():
            assert hasattr(blocking, name)
            assert hasattr(asynchronous, name)
    public = {name for name in vars(Client) if not name.startswith("_")}
    assert public == {name for name in vars(AsyncClient) if not name.startswith("_")}


def test_the_sdk_alone_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'redis', 'aiohttp', 'pydantic', 'penstock.services', 'numpy'}"
    code = f"import sys, penstock.client; print(sorted(set(sys.modules) & {heavy}))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"


async def test_the_blocking_client_raises_what_the_other_does(mesh: TestMesh) -> None:
    """What both return is shown by the examples in their docstrings."""

    def use() -> None:
        with Client(mesh.router.address, admin=mesh.router.admin_address) as client:
            with pytest.raises(penstock.NotFoundError):
                client.traces(trace_id="0" * 32)
            with pytest.raises(penstock.InvalidRequestError, match="limit_count"):
                client.traces(limit=1000)
            with pytest.raises(penstock.InvalidRequestError):
                client.generate("hello", temperature=9)
        with PlannerClient(mesh.parts["planner-0"].admin_address) as planner:
            plan = planner.get_plan()
            planner.set_plan(plan, expected_revision=plan.revision)
            with pytest.raises(ConflictError):
                planner.set_plan(plan, expected_revision=plan.revision)
            with pytest.raises(penstock.NotFoundError):
                planner.get_plan(999)

    await asyncio.to_thread(use)


async def test_the_blocking_client_may_be_shared_between_threads(mesh: TestMesh) -> None:
    texts: list[str] = []

    def use() -> None:
        with Client(mesh.router.address) as client:

            def ask() -> None:
                texts.append(client.generate("hello", temperature=0).text)

            threads = [threading.Thread(target=ask) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    await asyncio.to_thread(use)
    assert len(texts) == 8
    assert len(set(texts)) == 1


async def test_a_client_goes_on_at_the_other_router(mesh: TestMesh) -> None:
    gone = mesh.router.address
    async with AsyncClient([gone, mesh.parts["router-1"].address]) as client:
        await mesh.stop("router-0")
        assert (await client.generate("hello", temperature=0)).text


async def test_a_resumed_request_delivers_the_rest_and_is_not_judged_again(mesh: TestMesh) -> None:
    """What a client sends after its router died in the middle of an answer that stood."""
    from penstock.client import messages
    from penstock.proto.router.v1 import router_pb2 as pb
    from penstock.proto.router.v1 import router_pb2_grpc

    async with mesh.client() as client:
        whole = await client.generate("hello", temperature=0)
    request = messages.request_to_proto("hello", penstock.Options(temperature=0))
    request.resume.CopyFrom(pb.Resume(tier=whole.tier, token_ids=whole.token_ids[:2]))
    import grpc.aio

    text, kinds = "", []
    async with grpc.aio.insecure_channel(mesh.router.address) as channel:
        async for response in router_pb2_grpc.RouterServiceStub(channel).Generate(request):
            kinds.append(response.WhichOneof("event"))
            text += response.tokens.frame.text
    assert whole.text.endswith(text)
    assert len(text) < len(whole.text)
    assert "judged" not in kinds

    async def refused() -> grpc.aio.AioRpcError:
        """How the request is refused."""
        async with grpc.aio.insecure_channel(mesh.router.address) as channel:
            call = router_pb2_grpc.RouterServiceStub(channel).Generate(request)
            try:
                events = {response.WhichOneof("event") async for response in call}
            except grpc.aio.AioRpcError as error:
                return error
        raise AssertionError(f"served, with {events}")

    request.resume.tier = "huge"
    assert (await refused()).code() is grpc.StatusCode.NOT_FOUND
    request.model, request.resume.tier = "small", "large"
    error = await refused()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "resume.tier" in (error.details() or "")
    request.resume.CopyFrom(pb.Resume(tier="small", token_ids=[2**31 - 1]))
    error = await refused()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "resume.token_ids" in (error.details() or ""), "the field as the client knows it, not the worker's"


async def test_promises_about_latency_travel_to_the_worker(mesh: TestMesh) -> None:
    """No engine keeps SLOs yet: the answer says best effort, openly."""
    slo = Slo(0.5, (SloPhase(0, 0.1), SloPhase(100, 0.2)))
    async with mesh.client() as client:
        events = [e async for e in client.stream("hello", model="small", slo=slo)]
        admitted = [e for e in events if isinstance(e, penstock.TierAdmitted)]
        assert [e.slo_kept for e in admitted] == [False]
        with pytest.raises(penstock.InvalidRequestError, match=r"phases\[0\]"):
            await client.generate("hello", slo=Slo(phases=(SloPhase(0, 0.0),)))
