"""Check the health of the service in this container: exit status 0 if its gRPC health is SERVING.

With PENSTOCK_TLS_FOLDER the check uses the certificates in there, of the role that the container's process has.

`healthcheck.py [NAME]`: the full name of a service checks that service. `penstock.router.v1.RouterService` is SERVING while
the router should get requests. Without a name, the server as a whole is checked.
"""

import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def channel_to(address: str) -> grpc.Channel:
    """A channel to the service in this container."""
    folder = os.environ.get("PENSTOCK_TLS_FOLDER", "")
    if not folder:
        return grpc.insecure_channel(address)
    command = Path("/proc/1/cmdline").read_bytes().split(b"\0")
    module = next(part.decode() for part in command if part.endswith(b"_service"))
    role = module.removeprefix("penstock.").removesuffix("_service")
    identity = Path(folder, f"{role}.pem").read_bytes()
    credentials = grpc.ssl_channel_credentials(Path(folder, "ca.pem").read_bytes(), identity, identity)
    return grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", f"{role}.penstock")])


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    port = os.environ.get("PENSTOCK_GRPC_PORT", "50051")
    with channel_to(f"127.0.0.1:{port}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=2)
        except grpc.RpcError as error:
            sys.exit(f"no answer on port {port}: {error}")
    sys.exit(0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1)
