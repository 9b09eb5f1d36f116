"""Converts between the router's domain types and protobuf messages."""

from collections.abc import Callable, Iterable, Mapping

from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from router_service.domain.events import (
    Accepted,
    Answer,
    Escalated,
    EscalationReason,
    Finished,
    Heartbeat,
    InstanceChanged,
    Judged,
    Resume,
    RouterEvent,
    RouterRequest,
    SloResult,
    TierAdmitted,
    TierDeclined,
    TierStarted,
    TierSummary,
)
from services import proto_codec as common
from services.domain.errors import FieldProblem, InvalidRequest
from services.domain.prompt_samples import PromptSample
from services.domain.requests import (
    MAX_PROMPT_CHARS,
    Slo,
    cache_salt_problems,
    model_problems,
    prediction_problems,
    prompt_problems,
    request_id_problems,
    token_id_problems,
)
from services.domain.slo.promises import Promise, SloClass
from services.domain.workload import ServedRequest
from services.state.traces import SpanRecord
from services.state.usage import UsageOf

MAX_PRIORITY = 100

_ESCALATIONS = {
    EscalationReason.SCORE_BELOW_THRESHOLD: pb.ESCALATION_REASON_SCORE_BELOW_THRESHOLD,
    EscalationReason.JUDGE_UNAVAILABLE: pb.ESCALATION_REASON_JUDGE_UNAVAILABLE,
    EscalationReason.TIER_UNAVAILABLE: pb.ESCALATION_REASON_TIER_UNAVAILABLE,
    EscalationReason.PROMPT_TOO_LONG: pb.ESCALATION_REASON_PROMPT_TOO_LONG,
    EscalationReason.UNSUPPORTED_BY_MODEL: pb.ESCALATION_REASON_UNSUPPORTED_BY_MODEL,
    EscalationReason.TOO_LATE: pb.ESCALATION_REASON_TOO_LATE,
    EscalationReason.SLO_DECLINED: pb.ESCALATION_REASON_SLO_DECLINED,
    EscalationReason.PREDICTED_SCORE_LOW: pb.ESCALATION_REASON_PREDICTED_SCORE_LOW,
    EscalationReason.REJECTED_EARLY: pb.ESCALATION_REASON_REJECTED_EARLY,
    EscalationReason.TIE_NOT_ACCEPTED: pb.ESCALATION_REASON_TIE_NOT_ACCEPTED,
}
_SLO_CLASSES = {
    SloClass.STANDARD: common_pb2.SLO_CLASS_STANDARD,
    SloClass.BEST_EFFORT: common_pb2.SLO_CLASS_BEST_EFFORT,
}


def request_from_proto(
    request: pb.GenerateRequest,
    new_id: str,
    deadline_s: float,
    promise: Callable[[Slo], Promise] = lambda slo: Promise.received(slo, 0.0),
) -> RouterRequest:
    """The request of a client.

    new_id: the id of a request that brings none.
    deadline_s: on the clock of the event loop.
    promise: what a valid SLO promises from the request's arrival on; raises InvalidRequest if it names no known class.

    Raises:
        InvalidRequest: naming every unsound field; of what is too many, the first.
    """
    problems = [*model_problems(request.model, "model")]
    prompt = common.prompt_from_proto(request.prompt)
    sampling = common.sampling_from_proto(request.sampling)
    slo = common.slo_from_proto(request.slo) if request.HasField("slo") else None
    problems += prompt_problems(prompt, "prompt")
    problems += sampling.problems("sampling")
    problems += slo.problems("slo") if slo is not None else ()
    problems += prediction_problems(request.prediction, "prediction")
    problems += cache_salt_problems(request.cache_salt, "cache_salt")
    if abs(request.priority) > MAX_PRIORITY:
        problems.append(FieldProblem("priority", f"must be from -{MAX_PRIORITY} to {MAX_PRIORITY}"))
    if request.HasField("request_id"):
        problems += request_id_problems(request.request_id, "request_id")
    resume = None
    if request.HasField("resume"):
        problems += model_problems(request.resume.tier, "resume.tier")
        resumed = common.token_ids_from_proto(request.resume.token_ids, "resume.token_ids")
        problems += token_id_problems(resumed, "resume.token_ids")
        if len(request.resume.text) > MAX_PROMPT_CHARS:
            problems.append(FieldProblem("resume.text", f"longer than {MAX_PROMPT_CHARS} characters"))
        resume = Resume(request.resume.tier, resumed, request.resume.text)
    promised = None
    if slo is not None and not problems:
        promised = promise(slo)
    if problems:
        raise InvalidRequest(*problems)
    return RouterRequest(
        request_id=request.request_id if request.HasField("request_id") else new_id,
        model=request.model,
        prompt=prompt,
        sampling=sampling,
        deadline_s=deadline_s,
        promise=promised,
        priority=request.priority,
        resume=resume,
        prediction=request.prediction,
        cache_salt=request.cache_salt,
    )


def in_client_fields(error: InvalidRequest) -> InvalidRequest:
    """A worker's refusal with its fields named as clients know them."""
    names = {"resume_token_ids": "resume.token_ids"}
    return type(error)(*(FieldProblem(names.get(p.field, p.field), p.problem) for p in error.problems))


def event_to_proto(event: RouterEvent | Heartbeat, heartbeat_s: float) -> pb.GenerateResponse:
    """heartbeat_s: interval that `accepted` announces."""
    match event:
        case Answer(tier, frame):
            return pb.GenerateResponse(tokens=pb.AnswerTokens(tier=tier, frame=common.frame_to_proto(frame)))
        case Accepted(request_id, revision, seed, burst_step):
            accepted = pb.Accepted(
                request_id=request_id,
                plan_revision=revision,
                seed=seed,
                heartbeat_interval=common.duration(heartbeat_s),
                burst_step=burst_step,
            )
            return pb.GenerateResponse(accepted=accepted)
        case Heartbeat(interval_s):
            return pb.GenerateResponse(heartbeat=pb.Heartbeat(interval=common.duration(interval_s)))
        case TierStarted(tier, instance_id):
            return pb.GenerateResponse(tier_started=pb.TierStarted(tier=tier, instance_id=instance_id))
        case TierAdmitted():
            admitted = pb.TierAdmitted(
                tier=event.tier,
                instance_id=event.instance_id,
                slo_kept=event.slo_kept,
                slo_class=_slo_class_to_proto(event.slo_class),
            )
            return pb.GenerateResponse(tier_admitted=admitted)
        case TierDeclined(tier, instance_id, reason):
            declined = pb.TierDeclined(tier=tier, instance_id=instance_id, reason=reason)
            return pb.GenerateResponse(tier_declined=declined)
        case Judged():
            judged = pb.Judged(
                tier=event.tier,
                score=event.score,
                threshold=event.threshold,
                accepted=event.accepted,
                scorer=event.scorer,
                reason=event.reason,
                flagged=event.flagged,
                better_tier=event.better_tier,
            )
            return pb.GenerateResponse(judged=judged)
        case Escalated():
            escalated = pb.Escalated(
                from_tier=event.from_tier,
                to_tier=event.to_tier,
                reason=_ESCALATIONS[event.reason],
                predicted_score=event.predicted_score,
            )
            return pb.GenerateResponse(escalated=escalated)
        case InstanceChanged():
            changed = pb.InstanceChanged(
                tier=event.tier,
                from_instance_id=event.from_instance_id,
                to_instance_id=event.to_instance_id,
                offset=event.offset,
                reason=event.reason,
            )
            return pb.GenerateResponse(instance_changed=changed)
        case Finished():
            return pb.GenerateResponse(finished=_finished_to_proto(event))


def _finished_to_proto(event: Finished) -> pb.Finished:
    finished = pb.Finished(
        reason=common.finish_reason_to_proto(event.reason),
        tier=event.tier,
        usage=common.usage_to_proto(event.usage),
        tiers=[_summary_to_proto(summary) for summary in event.tiers],
        total_time=common.duration(event.total_s),
        trace_id=event.trace_id,
        tool_calls=[common.call_to_proto(call) for call in event.tool_calls],
        content=event.content,
    )
    if event.slo is not None:
        finished.slo.CopyFrom(_slo_result_to_proto(event.slo))
    if event.ttft_s is not None:
        finished.time_to_first_token.CopyFrom(common.duration(event.ttft_s))
    return finished


def _slo_class_to_proto(slo_class: SloClass | None) -> common_pb2.SloClass.ValueType:
    return common_pb2.SLO_CLASS_UNSPECIFIED if slo_class is None else _SLO_CLASSES[slo_class]


def _slo_result_to_proto(slo: SloResult) -> pb.SloResult:
    result = pb.SloResult(
        slo_class=_slo_class_to_proto(slo.slo_class),
        attained=slo.attained,
        window_count=slo.windows,
        late_window_count=slo.late_windows,
    )
    if slo.first_token_late_s is not None:
        result.first_token_late.CopyFrom(common.duration(slo.first_token_late_s))
    return result


def _summary_to_proto(summary: TierSummary) -> pb.TierSummary:
    return pb.TierSummary(
        tier=summary.tier,
        model=summary.model,
        instance_id=summary.instance_id,
        score=summary.score,
        threshold=summary.threshold,
        accepted=summary.accepted,
        usage=common.usage_to_proto(summary.usage),
        time=common.duration(summary.time_s),
        score_reason=summary.score_reason,
        flagged=summary.flagged,
    )


def usage_to_proto(of: UsageOf, measures: Mapping[str, float]) -> pb.TenantUsage:
    return pb.TenantUsage(
        tenant=of.tenant,
        key_id=of.key_id,
        tier=of.tier,
        request_count=round(measures.get("requests", 0.0)),
        prompt_token_count=round(measures.get("prompt_tokens", 0.0)),
        output_token_count=round(measures.get("output_tokens", 0.0)),
        tier_seconds=measures.get("tier_seconds", 0.0),
        cost=measures.get("cost", 0.0),
        compute_seconds=measures.get("compute_seconds", 0.0),
    )


def prompt_sample_to_proto(sample: PromptSample) -> pb.SampledPrompt:
    messages = [common_pb2.ChatMessage(role=role, content=content) for role, content in sample.messages]
    return pb.SampledPrompt(messages=messages)


def served_request_to_proto(request: ServedRequest) -> pb.ServedRequest:
    return pb.ServedRequest(
        arrival_seconds=request.arrival_s,
        prompt_token_count=request.input_tokens,
        output_token_count=request.output_tokens,
        tier=request.tier,
        cached_prompt_token_count=request.cached_tokens,
    )


def trace_to_proto(spans: Iterable[SpanRecord]) -> pb.Trace:
    return pb.Trace(trace_id=next(iter(spans)).trace_id, spans=[_span_to_proto(span) for span in spans])


def _span_to_proto(span: SpanRecord) -> pb.Span:
    return pb.Span(
        span_id=span.span_id,
        parent_span_id=span.parent_span_id,
        name=span.name,
        service=span.service,
        start_time=common.timestamp(span.start_s),
        duration=common.duration(span.duration_s),
        failed=span.failed,
        status_message=span.status_message,
        attributes=_attributes(span.attributes),
        events=[
            pb.SpanEvent(name=name, after=common.duration(after_s), attributes=_attributes(attributes))
            for name, after_s, attributes in span.events
        ],
    )


def _attributes(values: dict[str, str]) -> list[pb.SpanAttribute]:
    return [pb.SpanAttribute(key=key, value=value) for key, value in sorted(values.items())]
