"""What a client sees of its request, in order. No I/O."""

from collections.abc import Awaitable
from typing import Protocol

from penstock.services.domain.plans import CASCADE_MODEL
from penstock.services.domain.slo.promises import Promise
from penstock.types.events import Finished, RequestEvent
from penstock.types.prompts import Prompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import Resume
from penstock.types.sampling import SamplingParams
from penstock.types.values import value_type


@value_type(frozen=True, slots=True)
class RouterRequest:
    """model: `cascade` or a tier's name. deadline_s: on the event loop's clock. streamed: the client gets tokens as they are
    generated. prediction: what the client thinks that the answer will be, in large part; empty for none.

    cache_salt: only requests with the same one share the KV of prompts that begin alike; the client's, until its tenant is
    known.
    may_be_sampled: whether the prompt may be stored, by consent of the caller's tenant, or of the mesh file where no keys are
    needed.
    """

    request_id: str
    model: str
    prompt: Prompt
    sampling: SamplingParams
    deadline_s: float
    promise: Promise | None = None
    priority: int = 0
    resume: Resume | None = None
    streamed: bool = True
    prediction: str = ""
    cache_salt: str = ""
    may_be_sampled: bool = False


@value_type(frozen=True, slots=True)
class Answer:
    """Part of an accepted answer."""

    tier: str
    frame: TokenFrame


def is_cascade_workload(request: RouterRequest, event: Finished) -> bool:
    """Whether a finished request is workload to record: of the cascade, served by a tier, by this router from its start.

    Of a resumed request this router knows neither the arrival nor what was served before.
    """
    return request.model == CASCADE_MODEL and request.resume is None and bool(event.tiers)


RouterEvent = RequestEvent | Answer


class RequestOutput(Protocol):
    """The client's end of a request. `event` and `answer` are called in order, on the event loop, and must not block."""

    def event(self, event: RouterEvent) -> None:
        """Take any event except the answer."""
        ...

    def answer(self, tier: str, frame: TokenFrame) -> None:
        """Take a part of an accepted answer. Output that the client has not read is buffered here."""
        ...

    def sent(self) -> Awaitable[None]:
        """Return when the client has read enough for the request to give its place back."""
        ...
