"""Which role may call which RPC: the table, cell by cell, and what each listener of a running service refuses."""

import grpc
import pytest
from google.protobuf.descriptor import FileDescriptor
from grpc import aio

from penstock.proto.judge.v1 import judge_pb2
from penstock.proto.planner.v1 import planner_pb2
from penstock.proto.router.v1 import router_pb2
from penstock.proto.worker.v1 import worker_pb2
from penstock.services.access.roles import (
    PERMISSIONS,
    SERVICES,
    CallerRole,
    Listener,
    is_loopback,
    listening_host,
    may_call,
)
from tests.conftest import MeshFileMaker
from tests.support.empty_calls import status_of_empty_call
from tests.support.mesh import TestMesh
from tests.support.services import RedisProcess

ROUTER, STATUS = "/penstock.router.v1.RouterService/", "/penstock.router.v1.MeshService/"
WORKER, JUDGE = "/penstock.worker.v1.WorkerService/", "/penstock.judge.v1.JudgeService/"
PLANNER = "/penstock.planner.v1.PlannerService/"

# rows: RPCs; columns: the roles that may call them. The same as docs/how-to/security.md, written by hand.
TABLE: dict[str, str] = {
    ROUTER + "Generate": "client",
    ROUTER + "ListModels": "client",
    STATUS + "GetStatus": "admin",
    STATUS + "WatchStatus": "admin",
    STATUS + "ListTraces": "admin",
    STATUS + "GetUsage": "admin",
    STATUS + "ListServedRequests": "admin",
    STATUS + "ListSampledPrompts": "admin",
    STATUS + "MoveReply": "admin",
    "/penstock.router.v1.RouterProcessService/GetCounters": "router",
    "/penstock.router.v1.RouterProcessService/MoveOwnReply": "router",
    WORKER + "Generate": "router judge",
    WORKER + "GenerateMany": "router",
    WORKER + "Abort": "router admin",
    WORKER + "GetInfo": "router worker judge planner admin",
    WORKER + "GetLoad": "router worker judge planner admin",
    WORKER + "Drain": "admin",
    WORKER + "Tokenize": "router",
    WORKER + "Detokenize": "router",
    WORKER + "PlaceBid": "router",
    WORKER + "ConfirmBid": "router",
    WORKER + "MigrateOut": "router",
    WORKER + "MigrateIn": "worker",
    JUDGE + "Score": "router admin",
    JUDGE + "ListScorers": "router admin",
    PLANNER + "GetPlan": "admin",
    PLANNER + "SetPlan": "admin",
    PLANNER + "WatchPlan": "admin",
    PLANNER + "ListPlans": "admin",
    PLANNER + "PlanCascade": "admin",
    PLANNER + "SimulateDeployment": "admin",
    PLANNER + "PlanStages": "admin",
    "/grpc.health.v1.Health/Check": "client router worker judge planner admin",
    "/grpc.health.v1.Health/Watch": "client router worker judge planner admin",
    "/grpc.health.v1.Health/List": "client router worker judge planner admin",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "admin",
}


@pytest.mark.parametrize("role", CallerRole)
@pytest.mark.parametrize("method", TABLE)
def test_each_cell_of_the_table(method: str, role: CallerRole) -> None:
    assert may_call(method, {role}) is (role.value in TABLE[method].split())


def test_every_rpc_of_the_contracts_has_a_row() -> None:
    files: tuple[FileDescriptor, ...] = tuple(
        module.DESCRIPTOR for module in (router_pb2, worker_pb2, judge_pb2, planner_pb2)
    )
    rpcs = {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    }
    assert rpcs == {method for method in PERMISSIONS if method.startswith("/penstock.")}
    assert set(TABLE) == set(PERMISSIONS)


def test_an_rpc_without_a_row_is_for_no_role() -> None:
    assert not may_call("/penstock.router.v1.MeshService/Shutdown", set(CallerRole))


def test_listeners_trust_only_the_roles_that_call_them() -> None:
    trusted = {listener: set(listener.trusted_roles) for listener in Listener}
    assert trusted == {
        Listener.CLIENT: {CallerRole.CLIENT},
        Listener.INTERNAL: set(SERVICES),
        Listener.ADMIN: {CallerRole.ADMIN},
    }


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_loopback_may_always_be_listened_on(host: str) -> None:
    assert is_loopback(host)
    assert listening_host(host, authenticated=False, open_access=False) == host


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "mesh.example", ""])
def test_other_addresses_need_authentication_or_the_operators_word(host: str) -> None:
    assert listening_host(host, authenticated=False, open_access=False) == "127.0.0.1"
    assert listening_host(host, authenticated=True, open_access=False) == host
    assert listening_host(host, authenticated=False, open_access=True) == host


async def code_of(address: str, method: str) -> grpc.StatusCode:
    """The status of a call without a message; OK if it is served."""
    async with aio.insecure_channel(address) as channel:
        return await status_of_empty_call(channel, method)


PARTS = {"router-0": (ROUTER, STATUS), "worker-small-0": (WORKER,), "judge-0": (JUDGE,), "planner-0": (PLANNER,)}
LISTENER_OF = {"router-0": Listener.CLIENT}


@pytest.mark.parametrize("part", PARTS)
async def test_each_listener_of_each_service_refuses_what_its_callers_may_not_do(mesh: TestMesh, part: str) -> None:
    """By PERMISSION_DENIED, or UNIMPLEMENTED where the listener has no such service; nothing of the call is read."""
    chassis = mesh.parts[part]
    refused = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)
    for address, listener in (
        (chassis.address, LISTENER_OF.get(part, Listener.INTERNAL)),
        (chassis.admin_address, Listener.ADMIN),
    ):
        for method in PERMISSIONS:
            if method.startswith("/grpc.reflection.") or method.endswith("Health/Watch"):
                continue  # below; and Watch never ends
            code = await code_of(address, method)
            served = method.startswith((*PARTS[part], "/grpc.health.")) and may_call(method, listener.trusted_roles)
            if part == "router-0" and method.startswith(STATUS):
                served = listener is Listener.ADMIN
            if part == "router-0" and method.startswith(ROUTER):
                served = listener is Listener.CLIENT
            assert (code in refused) is not served, (address, listener, method, code)


async def test_reflection_is_served_to_administrators_only(mesh: TestMesh) -> None:
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    for chassis in mesh.parts.values():
        assert await code_of(chassis.address, method) is grpc.StatusCode.UNIMPLEMENTED
        assert await code_of(chassis.admin_address, method) is not grpc.StatusCode.UNIMPLEMENTED


async def test_a_migration_names_an_instance_and_no_address(mesh: TestMesh) -> None:
    """A router cannot be made to have a worker connect to an address of the caller's choice."""
    assert "target_address" not in worker_pb2.MigrateOutRequest.DESCRIPTOR.fields_by_name
    from penstock.proto.worker.v1 import worker_pb2_grpc

    request = worker_pb2.MigrateOutRequest(request_id="r", transfer_id="t", target_instance_id="10.0.0.1:80")
    async with aio.insecure_channel(mesh.parts["worker-small-0"].address) as channel:
        with pytest.raises(aio.AioRpcError, match=r"no worker '10\.0\.0\.1:80'"):
            async for _ in worker_pb2_grpc.WorkerServiceStub(channel).MigrateOut(request, timeout=30):
                pass


async def test_a_service_without_keys_and_certificates_listens_on_loopback_only(
    redis: RedisProcess, mesh_file: MeshFileMaker, caplog: pytest.LogCaptureFixture
) -> None:
    from penstock.planner_service.compose import compose
    from penstock.services.domain.instances import Role
    from tests.support.services import serving

    file = mesh_file()
    async with serving(Role.PLANNER, compose, file, redis.url, bind_host="0.0.0.0", admin_host="0.0.0.0") as planner:
        assert planner.address.startswith("127.0.0.1:")
        assert planner.admin_address.startswith("127.0.0.1:")
    assert "bind_host 0.0.0.0: without certificates this service listens on 127.0.0.1 only" in caplog.text
    async with serving(
        Role.PLANNER, compose, file, redis.url, bind_host="0.0.0.0", open_access=True, advertise_host="127.0.0.1"
    ) as planner:
        assert planner.settings.bind_host == "0.0.0.0"
