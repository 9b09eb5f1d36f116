"""Converts between the router's domain types and protobuf messages."""

from collections.abc import Callable, Mapping, Sequence

from penstock.mapper import to_message
from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.router_service.domain.events import Answer, RouterEvent, RouterRequest
from penstock.services import proto_codec as common
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.prompt_samples import PromptSample
from penstock.services.domain.slo.promises import Promise
from penstock.services.state.traces import SpanRecord
from penstock.services.state.usage import UsageOf
from penstock.types.events import Accepted, Heartbeat
from penstock.types.mesh_status import TenantUsage, Trace
from penstock.types.problems import FieldProblem
from penstock.types.requests import AnswerRequest
from penstock.types.slo import Slo
from penstock.types.values import replaced


def request_from_proto(
    request: pb.GenerateRequest, new_id: str, deadline_s: float, promise: Callable[[Slo | None], Promise | None]
) -> RouterRequest:
    """The request of a client.

    new_id: the id of a request that brings none.
    deadline_s: on the clock of the event loop.
    promise: what a valid SLO, or none, promises from now on; raises InvalidRequest if it names no known class.

    Raises:
        InvalidRequest: naming every unsound field; of what is too many, the first.
    """
    common.check_calls(request.prompt)
    answer_request = common.checked(request, AnswerRequest)
    return RouterRequest(
        request_id=new_id if answer_request.request_id is None else answer_request.request_id,
        model=answer_request.model,
        prompt=answer_request.prompt,
        sampling=answer_request.sampling,
        deadline_s=deadline_s,
        promise=promise(answer_request.slo),
        priority=answer_request.priority,
        resume=answer_request.resume,
        prediction=answer_request.prediction,
        cache_salt=answer_request.cache_salt,
    )


def in_client_fields(error: InvalidRequest) -> InvalidRequest:
    """A worker's refusal with its fields named as clients know them."""
    names = {"resume_token_ids": "resume.token_ids"}
    return type(error)(*(FieldProblem(names.get(p.field, p.field), p.problem) for p in error.problems))


def event_to_proto(event: RouterEvent | Heartbeat, heartbeat_s: float) -> pb.GenerateResponse:
    """heartbeat_s: interval that `accepted` announces."""
    match event:
        case Answer(tier, frame):  # by hand: for every token
            return pb.GenerateResponse(tokens=pb.AnswerTokens(tier=tier, frame=common.frame_to_proto(frame)))
        case Accepted():
            event = replaced(event, heartbeat_interval_s=heartbeat_s)
    return to_message(event, pb.GenerateResponse)


def usage_to_proto(of: UsageOf, measures: Mapping[str, float]) -> pb.TenantUsage:
    counts = [round(measures.get(name, 0.0)) for name in ("requests", "prompt_tokens", "output_tokens")]
    sums = [measures.get(name, 0.0) for name in ("tier_seconds", "cost", "compute_seconds")]
    return to_message(TenantUsage(of.tenant, of.key_id, of.tier, *counts, *sums), pb.TenantUsage)


def prompt_sample_to_proto(sample: PromptSample) -> pb.SampledPrompt:
    messages = [common_pb2.ChatMessage(role=role, content=content) for role, content in sample.messages]
    return pb.SampledPrompt(messages=messages)


def trace_to_proto(spans: Sequence[SpanRecord]) -> pb.Trace:
    return to_message(Trace(spans[0].trace_id, tuple(spans)), pb.Trace)
