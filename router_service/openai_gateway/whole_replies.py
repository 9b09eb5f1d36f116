"""The body of a reply that is not streamed, encoded without blocking other requests for long.

Logprobs may be megabytes: they are encoded in slices, and other requests are processed between them.
"""

import asyncio
import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from router_service.openai_gateway import replies
from router_service.openai_gateway.json_values import json_bytes
from router_service.openai_gateway.replies import ChatFormat, Choice, Format, Json
from services.domain.requests import PositionLogprobs

SLICE_VALUES = 1000
"""Number of logprobs encoded at once: about ten milliseconds of the event loop."""


async def encoded(shape: Format, head: Json, choices: Seq[Choice], *, logprobs: bool) -> bytes:
    """A reply as JSON: `head` with its choices."""
    if not logprobs:
        return json_bytes(head | {"choices": [shape.choice(choice, logprobs=False) for choice in choices]})
    pieces = [_dumps(head)[:-1], ',"choices":[']
    for number, choice in enumerate(choices):
        fields = shape.choice(choice, logprobs=False)
        del fields["logprobs"]
        pieces += ["," if number else "", _dumps(fields)[:-1], ',"logprobs":']
        for piece in _chat(choice) if isinstance(shape, ChatFormat) else _completion(choice):
            pieces.append(piece)
            await asyncio.sleep(0)
        pieces.append("}")
    pieces.append("]}")
    return "".join(pieces).encode()


def _chat(choice: Choice) -> Iterator[str]:
    yield '{"content":['
    for number, part in enumerate(_slices(choice.positions)):
        yield ("," if number else "") + _dumps(replies.chat_logprobs(part)["content"])[1:-1]
    yield "]}"


def _completion(choice: Choice) -> Iterator[str]:
    """The four lists of the format, each joined from the slices."""
    lists: dict[str, list[str]] = {key: [] for key in replies.completion_logprobs([])}
    text_before = 0
    for part in _slices(choice.positions):
        values = replies.completion_logprobs(part, text_before)
        text_before += sum(map(len, values["tokens"]))
        for key, items in lists.items():
            items.append(_dumps(values[key])[1:-1])
        yield ""
    yield "{" + ",".join(f'"{key}":[{",".join(items)}]' for key, items in lists.items()) + "}"


def _slices(positions: Seq[PositionLogprobs]) -> Iterator[Seq[PositionLogprobs]]:
    size = max(1, SLICE_VALUES // (1 + max((len(p.top) for p in positions[:1]), default=0)))
    return (positions[at : at + size] for at in range(0, len(positions), size))


def _dumps(value: object) -> str:
    return json.dumps(value)
