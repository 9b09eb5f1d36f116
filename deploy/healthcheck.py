"""Check the health of the service in this container: exit status 0 if its gRPC health is SERVING.

`healthcheck.py [NAME]`: the full name of a service checks that service. `penstock.router.v1.RouterService` is SERVING while
the router should get requests. Without a name, the server as a whole is checked.
"""

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    port = os.environ.get("PENSTOCK_GRPC_PORT", "50051")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=2)
        except grpc.RpcError as error:
            sys.exit(f"no answer on port {port}: {error}")
    sys.exit(0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1)
