"""The clients against a real mesh, and against the contract."""

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc.aio
import pytest

import penstock
from penstock import AsyncClient, AsyncPlannerClient, Client, ConflictError, PlannerClient
from penstock.client import messages
from penstock.proto.planner.v1 import planner_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc
from tests.support.mesh import TestMesh


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
    services = pb.DESCRIPTOR.services_by_name  # RouterProcessService is not served to clients
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

    def use() -> set[str]:
        with Client(mesh.router.address) as client, ThreadPoolExecutor(8) as pool:
            return {*pool.map(lambda _: client.generate("hello", temperature=0).text, range(8))}

    assert len(await asyncio.to_thread(use)) == 1


async def test_a_resumed_request_delivers_the_rest_and_is_not_judged_again(mesh: TestMesh) -> None:
    """What a client sends after its router died in the middle of an answer that stood."""
    async with mesh.client() as client:
        whole = await client.generate("hello", temperature=0)
    request = messages.request_to_proto("hello", penstock.Options(temperature=0))
    request.resume.CopyFrom(pb.Resume(tier=whole.tier, token_ids=whole.token_ids[:2]))
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
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in router_pb2_grpc.RouterServiceStub(channel).Generate(request):
                    pass
        return caught.value

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
