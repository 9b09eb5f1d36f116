"""What a simulation measured."""

from penstock.proto.planner.v1 import planner_pb2 as pb
from planner_service.cascade_plan import Felt
from planner_service.simulator import Percentiles, Report


def report_to_proto(report: Report) -> pb.TierReport:
    return pb.TierReport(
        requests=report.requests,
        time_to_first_token=percentiles_to_proto(report.ttft),
        time_per_output_token=percentiles_to_proto(report.tpot),
        latency=percentiles_to_proto(report.latency),
        requests_per_s=report.requests_per_s,
        output_tokens_per_s=report.output_tokens_per_s,
        utilisation=report.utilisation,
        preemptions=report.preemptions,
    )


def percentiles_to_proto(p: Percentiles) -> pb.Percentiles:
    return pb.Percentiles(p50=p.p50, p95=p.p95, p99=p.p99, mean=p.mean)


def user_latency_to_proto(felt: Felt) -> pb.UserLatency:
    return pb.UserLatency(
        end_to_end=percentiles_to_proto(felt.end_to_end),
        first_token=percentiles_to_proto(felt.first_token),
        pace=percentiles_to_proto(felt.pace),
    )
