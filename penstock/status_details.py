"""What Penstock's services add to a gRPC status: the reason, the problems by field, and when to try again."""

from dataclasses import dataclass, field

from google.rpc import error_details_pb2, status_pb2

from penstock.types.problems import FieldProblem


@dataclass(slots=True)
class StatusDetails:
    """reason: empty if no service of ours has sent the status. retry_after_s: None if the status does not say."""

    reason: str = ""
    problems: list[FieldProblem] = field(default_factory=list)
    retry_after_s: float | None = None


def details_of(status: status_pb2.Status) -> StatusDetails:
    details = StatusDetails()
    for detail in status.details:
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            details.reason = info.reason
        elif detail.Unpack(bad):
            details.problems += [FieldProblem(each.field, each.description) for each in bad.field_violations]
        elif detail.Unpack(retry):
            details.retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    return details
