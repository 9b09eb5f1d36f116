"""Malformed gRPC calls, drawn from a seeded generator: the same seed draws the same calls."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from penstock.proto.common.v1 import common_pb2
from penstock.proto.judge.v1 import judge_pb2
from penstock.proto.planner.v1 import planner_pb2
from penstock.proto.router.v1 import router_pb2
from penstock.proto.worker.v1 import worker_pb2
from tests.support.malformed_forms import hostile_form
from tests.support.malformed_http import changed_bytes

ROUTER, MESH = "/penstock.router.v1.RouterService/", "/penstock.router.v1.MeshService/"
WORKER, JUDGE = "/penstock.worker.v1.WorkerService/", "/penstock.judge.v1.JudgeService/"
PLANNER = "/penstock.planner.v1.PlannerService/"
GENERATE = ROUTER + "Generate"
LIMIT_S = 0.5
"""Deadline of calls that would stream for ever if what is wrong with them went unseen."""


@dataclass(frozen=True)
class GrpcCase:
    """A call of `method` at an instance of `role`.

    data: the one message; None for a call that ends without any.
    endless: a sound call never ends; its deadline is the test's own.
    fields: one of these has to be named by an INVALID_ARGUMENT, where that is certain.
    """

    kind: str
    method: str
    data: bytes | None
    role: str = "router"
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    endless: bool = False
    fields: tuple[str, ...] = field(default=())


def grpc_cases(seed: int, count: int) -> Iterator[GrpcCase]:
    rng = random.Random(seed)
    kinds = list(_KINDS)
    for _ in range(count):
        yield rng.choices(kinds, [_KINDS[k] for k in kinds])[0](rng)


def sound() -> router_pb2.GenerateRequest:
    request = router_pb2.GenerateRequest(model="small", priority=1)
    request.prompt.chat.messages.add(role="user", content="hello")
    request.sampling.temperature = 0.5
    request.sampling.max_tokens = 4
    request.sampling.stop.append("xyz")
    request.slo.time_to_first_token.seconds = 60
    request.slo.phases.add(from_output_token=0).time_per_output_token.seconds = 60
    return request


def junk_request(rng: random.Random) -> router_pb2.GenerateRequest:
    """A request whose fields are junk of the right type: the wire lets nothing else through."""
    request = router_pb2.GenerateRequest(
        model=rng.choice(("cascade", "small", "large", "huge", "", "x" * 1_000, "é" * 5_000, "\x00")),
        priority=rng.choice((0, 0, 5, -(2**31), 2**31 - 1)),
    )
    kind = rng.random()
    if kind < 0.3:
        for _ in range(rng.randint(0, 3)):
            request.prompt.chat.messages.add(
                role=rng.choice(("user", "user", "assistant", "robot", "", "é" * 3_000)),
                content=rng.choice(("", "hi", "\x00")),
            )
        request.prompt.chat.SetInParent()
    elif kind < 0.5:
        request.prompt.text = rng.choice(("", "hello", "\x00", "é" * 50))
    elif kind < 0.8:
        request.prompt.token_ids.ids.extend(rng.choice((0, 5, 200, 2**32 - 1)) for _ in range(rng.randint(0, 4)))
        request.prompt.token_ids.SetInParent()
    for descriptor in common_pb2.SamplingParams.DESCRIPTOR.fields:
        if rng.random() < 0.4:
            _set_junk(request.sampling, descriptor, rng)
    if rng.random() < 0.3:
        for duration in (request.slo.time_to_first_token, request.slo.phases.add().time_per_output_token):
            duration.seconds = rng.choice((0, -1, 5, 315_576_000_000, 2**62, -(2**62)))
            duration.nanos = rng.choice((0, 1, -1, 2**31 - 1, -(2**31)))
        request.slo.phases[0].from_output_token = rng.choice((0, 2**32 - 1))
    if rng.random() < 0.2:
        request.prediction = rng.choice(("x", "\x00", "é" * 70_000))
    if rng.random() < 0.3:
        request.request_id = rng.choice(("", f"r-{rng.getrandbits(64)}", "x" * 129, "a\nb", "\U0001f600" * 2_000))
    if rng.random() < 0.3:
        request.resume.tier = rng.choice(("", "small", "huge", "x" * 5_000))
        request.resume.token_ids.extend(rng.choice((1, 2**32 - 1)) for _ in range(rng.randint(0, 3)))
    return request


def _set_junk(message: Any, descriptor: FieldDescriptor, rng: random.Random) -> None:
    values: dict[int, tuple[Any, ...]] = {
        FieldDescriptor.TYPE_DOUBLE: (0.0, -0.0, 0.5, 1.0, -1.0, 1e300, 1e-300, -1e-300, math.inf, math.nan),
        FieldDescriptor.TYPE_UINT64: (0, 1, 2**63, 2**64 - 1),
        FieldDescriptor.TYPE_UINT32: (0, 1, 3, 21, 2**32 - 1),
        FieldDescriptor.TYPE_STRING: ("", "x", "y" * 300),
        FieldDescriptor.TYPE_BOOL: (True, False),
    }
    if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
        key, value = (values[field.type] for field in descriptor.message_type.fields)
        getattr(message, descriptor.name).update({rng.choice(key): rng.choice(value) for _ in range(rng.randint(0, 3))})
    elif descriptor.message_type is not None:
        getattr(message, descriptor.name).SetInParent()
        for field in descriptor.message_type.fields:
            if rng.random() < 0.4:
                _set_junk(getattr(message, descriptor.name), field, rng)
    elif descriptor.is_repeated:
        getattr(message, descriptor.name).extend(rng.choice(values[descriptor.type]) for _ in range(rng.randint(0, 18)))
    else:
        setattr(message, descriptor.name, rng.choice(values[descriptor.type]))


def _junk(rng: random.Random) -> GrpcCase:
    return GrpcCase("junk fields", GENERATE, junk_request(rng).SerializeToString())


def _wrong_field(rng: random.Random) -> GrpcCase:
    request = sound()
    name = rng.choice(
        ("model", "temperature", "top_p", "seed", "max", "stop", "role", "priority", "id", "slo", "prompt", "tier")
    )
    fields = {
        "temperature": "sampling.temperature", "top_p": "sampling.top_p", "seed": "sampling.seed", "stop": "sampling.stop",
        "max": "sampling.max_tokens", "role": "prompt.chat.messages[0].role", "id": "request_id",
        "slo": "slo.time_to_first_token", "tier": "resume.tier",
    }  # fmt: skip
    match name:
        case "model":
            request.model = rng.choice(("", "x" * 300))
        case "temperature":
            request.sampling.temperature = rng.choice((-1.0, 2.1, math.nan, math.inf, -1e-300))
        case "top_p":
            request.sampling.top_p = rng.choice((0.0, -0.5, 1.1, math.nan))
        case "seed":
            request.sampling.seed = rng.choice((2**63, 2**64 - 1))
        case "max":
            request.sampling.max_tokens = 0
        case "stop":
            request.sampling.stop.extend(["x"] * 20)
        case "role":
            request.prompt.chat.messages[0].role = rng.choice(("", "robot", "é" * 5_000))
        case "priority":
            request.priority = rng.choice((101, -101, 2**31 - 1))
        case "id":
            request.request_id = rng.choice(("", "a\nb", "x" * 129))
        case "slo":
            request.slo.time_to_first_token.seconds = rng.choice((-1, 2**62))
        case "prompt":
            request.ClearField("prompt")
        case "tier":
            request.resume.token_ids.append(1)
    return GrpcCase("wrong field", GENERATE, request.SerializeToString(), fields=(fields.get(name, name),))


def _form(rng: random.Random) -> GrpcCase:
    request, form = sound(), hostile_form(rng)
    setattr(request.sampling.structured_output, form.kind.value, form.text)
    request.sampling.max_tokens = 40
    return GrpcCase("form", GENERATE, request.SerializeToString())


def _changed(rng: random.Random) -> GrpcCase:
    return GrpcCase("changed bytes", GENERATE, changed_bytes(rng, sound().SerializeToString()))


def _noise(rng: random.Random) -> GrpcCase:
    method = rng.choice((GENERATE, ROUTER + "ListModels", MESH + "GetStatus", "/grpc.health.v1.Health/Check"))
    return GrpcCase("noise", method, rng.randbytes(rng.randint(0, 500)))


def _method(rng: random.Random) -> GrpcCase:
    method = rng.choice(
        (ROUTER + "Nothing", ROUTER, "/", "x", "//", "/a/b/c", f"/{'x' * 3_000}/y", ROUTER + "generate", GENERATE + "/")
    )
    return GrpcCase("method", method, sound().SerializeToString())


def _metadata(rng: random.Random) -> GrpcCase:
    """Of at most 8 KiB together: over that, gRPC itself refuses calls, with RESOURCE_EXHAUSTED."""
    pairs: tuple[tuple[str, str | bytes], ...] = (
        ("traceparent", "00-zz-1-1"), ("traceparent", "x" * 3_000), ("tracestate", ",=;" * 300), ("baggage", "a=b,;=;" * 99),
        ("x-bin", rng.randbytes(1_000)), ("x", "y" * 3_000), ("authorization", "Bearer " + "z" * 500),
        ("traceparent", "00-" + "0" * 32 + "-" + "0" * 16 + "-00"), ("grpc-trace-bin", b"\x00\x01"),
        ("content-language", "%ff%00"),
    )  # fmt: skip
    return GrpcCase(
        "metadata", GENERATE, sound().SerializeToString(), metadata=tuple(rng.sample(pairs, rng.randint(1, 2)))
    )


def _nothing(rng: random.Random) -> GrpcCase:
    return GrpcCase(
        "nothing", rng.choice((GENERATE, ROUTER + "ListModels", MESH + "WatchStatus")), None, fields=("request",)
    )


def _operators(rng: random.Random) -> GrpcCase:
    """What operators call, with junk."""
    text = rng.choice(("", "x", "é" * 3_000, "\x00", "0" * 32))
    limit = rng.choice((0, 101, 2**32 - 1, 1))
    watch = router_pb2.WatchStatusRequest()
    watch.interval.seconds, watch.interval.nanos = rng.choice(((0, 0), (-1, 0), (2**62, 0), (0, 2**31 - 1), (1, -5)))
    method, message, endless = rng.choice(
        (
            (MESH + "ListTraces", router_pb2.ListTracesRequest(trace_id=text), False),
            (MESH + "ListTraces", router_pb2.ListTracesRequest(limit_count=limit), False),
            (MESH + "MoveReply", router_pb2.MoveReplyRequest(request_id=text, instance_id=text), False),
            (MESH + "WatchStatus", watch, True),
            (ROUTER + "ListModels", router_pb2.ListModelsRequest(), False),
        )
    )
    return GrpcCase("operators", method, message.SerializeToString(), endless=endless)


def _worker(rng: random.Random) -> GrpcCase:
    """The services behind the router are held to the same."""
    prompt, sampling = junk_request(rng).prompt, junk_request(rng).sampling
    sampling.ignore_eos = False
    text = rng.choice(("", "x", "é" * 3_000))
    ask = worker_pb2.PlaceBidRequest(
        request_id=text, sender_instance_id=text, sequence_tokens=rng.choice((0, 1, 2**32 - 1))
    )
    generate = worker_pb2.GenerateRequest(request_id=f"w-{rng.getrandbits(64)}", prompt=prompt, sampling=sampling)
    ids = common_pb2.TokenIds(ids=[0, 2**32 - 1] if rng.random() < 0.5 else [])
    digest = rng.choice(("", "bytes", "é" * 3_000))
    if rng.random() < 0.5:
        form = {"token_ids": ids} if rng.random() < 0.5 else {"text": text}
        generate.draft.CopyFrom(worker_pb2.Draft(tokenizer_digest=digest, **form))
    step = worker_pb2.ReplyStep(reply_id=rng.choice((0, 1, 2**64 - 1)), start=worker_pb2.StartReply(request=generate))
    step.start.timeout.seconds = rng.choice((-1, 5, 2**62))
    choices: tuple[tuple[str, Message], ...] = (
        ("Generate", generate),
        ("Tokenize", worker_pb2.TokenizeRequest(prompt=prompt)),
        ("Detokenize", worker_pb2.DetokenizeRequest(token_ids=[rng.choice((0, 5, 256, 257, 2**32 - 1))])),
        ("PlaceBid", ask),
        ("Abort", worker_pb2.AbortRequest(request_id=text)),
        ("GetInfo", worker_pb2.GetInfoRequest()),
        ("GenerateMany", worker_pb2.GenerateManyRequest(steps=[step])),
        ("ConfirmBid", worker_pb2.ConfirmBidRequest(confirmed=ask)),
        ("MigrateIn", worker_pb2.MigrateInRequest(closing=worker_pb2.TransferClosing(tokens=[2**32 - 1]))),
        ("MigrateOut", worker_pb2.MigrateOutRequest(request_id=text, transfer_id=text, target_instance_id=text)),
    )
    name, message = rng.choice(choices)
    data = message.SerializeToString()
    return GrpcCase("worker", WORKER + name, changed_bytes(rng, data) if rng.random() < 0.5 else data, "worker")


def _judge(rng: random.Random) -> GrpcCase:
    score = judge_pb2.ScoreRequest(scorer=rng.choice(("", "confidence", "nobody", "é" * 3_000)))
    for _ in range(rng.choice((0, 1, 2, 300))):
        item = score.items.add(answer=rng.choice(("", "a", "é" * 50)), finish_reason=rng.choice((0, 1, 77)))
        item.prompt.CopyFrom(junk_request(rng).prompt)
        item.logprobs.mean = rng.choice((math.nan, math.inf, -1.0))
    data = score.SerializeToString()
    return GrpcCase("judge", JUDGE + "Score", changed_bytes(rng, data) if rng.random() < 0.5 else data, "judge")


def _planner(rng: random.Random) -> GrpcCase:
    plan = planner_pb2.Plan(scorer="x", judge_unavailable=99)  # type: ignore[arg-type]
    plan.tiers.add(name=rng.choice(("", "x" * 5_000, "é")), threshold=math.nan, instances=2**32 - 1)
    plan.created_at = rng.choice((0.0, math.nan))
    crowded = planner_pb2.Plan(tiers=[planner_pb2.TierPlan()] * 100_000) if rng.random() < 0.1 else plan
    choices: tuple[tuple[str, Message], ...] = (
        ("SetPlan", planner_pb2.SetPlanRequest(plan=plan)),
        ("SetPlan", planner_pb2.SetPlanRequest(plan=crowded)),
        ("GetPlan", planner_pb2.GetPlanRequest(revision=rng.choice((0, 2**64 - 1)))),
        ("ListPlans", planner_pb2.ListPlansRequest(limit_count=rng.choice((0, 2**32 - 1)))),
        ("PlanStages", planner_pb2.PlanStagesRequest(tier=rng.choice(("", "nobody", "x" * 5_000)))),
    )
    name, message = rng.choice(choices)
    return GrpcCase("planner", PLANNER + name, message.SerializeToString(), "planner")


def _large(rng: random.Random) -> GrpcCase:
    request = sound()
    match rng.randrange(6):
        case 0:
            request.prompt.chat.messages.extend([common_pb2.ChatMessage()] * 300_000)
        case 1:
            request.sampling.stop.extend([""] * 500_000)
        case 2:
            request.prompt.token_ids.ids.extend([1] * 1_000_001)
        case 3:
            request.prompt.text = "x" * 2_000_001
        case 4:
            request.slo.phases.extend([common_pb2.SloPhase()] * 300_000)
        case 5:
            request.resume.token_ids.extend([1] * 1_000_001)
    return GrpcCase("large", GENERATE, request.SerializeToString())


_KINDS: dict[Callable[[random.Random], GrpcCase], float] = {
    _junk: 25,
    _wrong_field: 20,
    _changed: 20,
    _form: 2,
    _noise: 8,
    _method: 4,
    _metadata: 4,
    _nothing: 3,
    _operators: 5,
    _worker: 5,
    _judge: 3,
    _planner: 2,
    _large: 1,
}
