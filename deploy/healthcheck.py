"""Is the service in this container serving? Exit status 0 if its gRPC health says so."""

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if __name__ == "__main__":
    port = os.environ.get("PENSTOCK_GRPC_PORT", "50051")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.RpcError as error:
            sys.exit(f"no answer on port {port}: {error}")
    sys.exit(0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1)
