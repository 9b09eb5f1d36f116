"""Is the service in this container serving? Exit status 0 if its gRPC health says so.

`healthcheck.py [NAME]`: a service's full name asks for that service. `penstock.router.v1.RouterService` serves while the
router should be sent requests. Without a name the server as a whole is asked.
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
