"""Requests and events as protobuf messages. No I/O."""

from penstock.client import chat, types
from penstock.mapper import from_message, read_time, to_message
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.types.events import RequestEvent
from penstock.types.replies import PositionLogprobs
from penstock.types.requests import AnswerRequest

_RequestEvent = RequestEvent | None


def request_to_proto(prompt: types.Prompt, options: types.Options) -> pb.GenerateRequest:
    """Raises:
    ValueError: A field cannot be sent, or options contradict each other.
    """
    form = options.structured_output
    if form is not None and (problem := next(form.problems("structured_output"), None)) is not None:
        raise ValueError(f"{problem.field}: {problem.problem}")
    request = AnswerRequest(
        model=options.model,
        prompt=chat.prompt_value(prompt, options),
        sampling=options.sampling,
        slo=options.slo,
        priority=options.priority,
        request_id=options.request_id,
        prediction=options.prediction,
        cache_salt=options.cache_salt,
    )
    return to_message(request, pb.GenerateRequest)


def event_from_proto(response: pb.GenerateResponse) -> types.Event | None:
    """The event; None for a heartbeat, and for an event that is unknown to this version."""
    if not response.HasField("tokens"):
        event: RequestEvent | None = from_message(response, _RequestEvent)
        return event
    frame = response.tokens.frame  # by hand: for every token
    logprobs = tuple([from_message(position, PositionLogprobs) for position in frame.logprobs])
    return types.Tokens(response.tokens.tier, frame.offset, tuple(frame.token_ids), frame.text, logprobs)


def heartbeat_interval_s(response: pb.GenerateResponse) -> float | None:
    """The router's longest time between two messages of a stream, if the response announces it."""
    match response.WhichOneof("event"):
        case "heartbeat" if response.heartbeat.HasField("interval"):
            return read_time(response.heartbeat.interval)
        case "accepted" if response.accepted.HasField("heartbeat_interval"):
            return read_time(response.accepted.heartbeat_interval)
        case _:
            return None
