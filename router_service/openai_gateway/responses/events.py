"""Responses of /v1/responses: the object, and the events by which it grows. No I/O.

A response that is not streamed is the object of the last event, so both forms agree.
"""

import json
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from penstock.router_service.domain.events import RouterEvent
from penstock.router_service.openai_gateway.replies import Choice
from penstock.router_service.openai_gateway.responses.schema import Json, ResponseRequest
from penstock.services.tool_calls.formats import ToolFormat
from penstock.services.tool_calls.parser import CallDelta, ContentDelta, ToolCallParser, call_id
from penstock.types.events import Finished
from penstock.types.replies import FinishReason, TokenFrame


class ResponseFormat:
    """/v1/responses, for one request."""

    prefix = "resp_"

    def __init__(self, request: ResponseRequest) -> None:
        self.request = request

    def whole(
        self, request_id: str, choice: Choice, tool_format: Callable[[str], ToolFormat | None], extension: Any
    ) -> Json:
        """The response to a request whose reply is complete."""
        growing = GrowingResponse(self.request, request_id)
        if choice.reasoning:
            growing.reasoning(choice.reasoning)
        assert choice.finished is not None
        growing.text(choice.text, tool_format(choice.finished.tier))
        growing.finish(choice.finished, extension)
        return growing.response


class StreamedResponse:
    """Converts the events of a request to those of the stream. The interface is that of `StreamedReply`."""

    def __init__(
        self,
        shape: ResponseFormat,
        request_id: str,
        choice: Choice,
        send: Callable[[bytes], None],
        tool_format: Callable[[str], ToolFormat | None],
        extension: Callable[[], Any],
    ) -> None:
        self._growing, self._offers_tools = GrowingResponse(shape.request, request_id), bool(shape.request.tools)
        self._choice, self._send, self._tool_format, self._extension = choice, send, tool_format, extension
        self._form: ToolFormat | None = None  # of the tier that answers
        self._number = 0
        self._opened = False

    def answer(self, index: int, tier: str, frame: TokenFrame) -> None:
        self._open()
        if not frame.text:
            return
        if self._form is None and self._offers_tools:
            self._form = self._tool_format(tier)
        self._send_all(self._growing.text(frame.text, self._form))

    def reasoning(self, index: int, text: str) -> None:
        self._open()
        self._send_all(self._growing.reasoning(text))

    def event(self, index: int, event: RouterEvent) -> None:
        if not isinstance(event, Finished):
            return
        self._choice.event(event)
        if event.reason is FinishReason.DECLINED:
            return
        self._open()
        self._send_all(self._growing.finish(event, self._extension()))

    def end(self) -> bytes:
        """Nothing: the last event has been sent already, and this stream has no end mark."""
        return b""

    def error(self, body: Json) -> None:
        error = body["error"]
        self._send_all([{"type": "error", **{key: error[key] for key in ("code", "message", "param")}}])

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            self._send_all(self._growing.begin())

    def _send_all(self, events: Seq[Json]) -> None:
        for event in events:
            event["sequence_number"] = self._number
            self._number += 1
            data = json.dumps(event, separators=(",", ":"))
            self._send(f"event: {event['type']}\ndata: {data}\n\n".encode())


class GrowingResponse:
    """A response, and the events of each step of its growth.

    Its output is reasoning, then text and calls in the order in which the model writes them. One item is open at a time.
    """

    def __init__(self, request: ResponseRequest, request_id: str) -> None:
        self._request, self._id = request, request_id
        self._parser: ToolCallParser | None = None
        self._open: Json | None = None  # the item that grows
        self.response = _envelope(request, request_id)

    def begin(self) -> list[Json]:
        return [self._snapshot("response.created"), self._snapshot("response.in_progress")]

    def reasoning(self, text: str) -> list[Json]:
        """More of the reasoning."""
        events = self._opened("reasoning", "rs", {"summary": [], "content": []})
        item = self._item
        if not item["content"]:
            item["content"].append({"type": "reasoning_text", "text": ""})
        item["content"][0]["text"] += text
        return [*events, self._at("response.reasoning_text.delta", content_index=0, delta=text)]

    def text(self, text: str, tool_format: ToolFormat | None) -> list[Json]:
        """More of the model's text, in which there may be calls."""
        if not self._request.tools or tool_format is None:
            return self._content(text)
        if self._parser is None:
            self._parser = ToolCallParser(tool_format, self._request.chat)
        return self._pieces(self._parser.push(text))

    def finish(self, finished: Finished, extension: Any) -> list[Json]:
        """The end of the reply."""
        events = self._pieces(self._parser.finish()) if self._parser is not None else []
        cut = finished.reason is not FinishReason.STOP
        events += self._closed("incomplete" if cut else "completed")
        response = self.response
        response["status"] = "incomplete" if cut else "completed"
        response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        usage = finished.usage
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_prompt_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
        }
        response["penstock"] = extension
        return [*events, self._snapshot("response.incomplete" if cut else "response.completed")]

    def _pieces(self, pieces: Seq[ContentDelta | CallDelta]) -> list[Json]:
        events = list[Json]()
        for piece in pieces:
            events += self._content(piece.text) if isinstance(piece, ContentDelta) else self._call(piece)
        return events

    def _content(self, text: str) -> list[Json]:
        events = self._opened("message", "msg", {"role": "assistant", "content": []})
        item = self._item
        if not item["content"]:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(part)
            events.append(self._at("response.content_part.added", content_index=0, part=dict(part)))
        item["content"][0]["text"] += text
        return [*events, self._at("response.output_text.delta", content_index=0, delta=text, logprobs=[])]

    def _call(self, piece: CallDelta) -> list[Json]:
        events = list[Json]()
        if piece.name:
            events += self._closed("completed")
            call = {"call_id": call_id(self._id, piece.index), "name": piece.name, "arguments": ""}
            events += self._opened("function_call", "fc", call)
        if piece.arguments:
            self._item["arguments"] += piece.arguments
            events.append(self._at("response.function_call_arguments.delta", delta=piece.arguments))
        return events

    @property
    def _item(self) -> Json:
        assert self._open is not None
        return self._open

    def _opened(self, kind: str, prefix: str, fields: Json) -> list[Json]:
        """Open an item, unless one of this kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self._closed("completed")
        item_id = f"{prefix}_{self._id}_{len(self.response['output'])}"
        self._open = {"type": kind, "id": item_id, "status": "in_progress", **fields}
        self.response["output"].append(self._open)
        return [*events, self._about("response.output_item.added", item=_copied(self._open))]

    def _closed(self, status: str) -> list[Json]:
        """Close the open item."""
        item = self._open
        if item is None:
            return []
        events = list[Json]()
        match item["type"]:
            case "message":
                (part,) = item["content"]
                events.append(self._at("response.output_text.done", content_index=0, text=part["text"], logprobs=[]))
                events.append(self._at("response.content_part.done", content_index=0, part=dict(part)))
            case "reasoning":
                text = item["content"][0]["text"]
                events.append(self._at("response.reasoning_text.done", content_index=0, text=text))
            case "function_call":
                arguments = item["arguments"] = item["arguments"] or "{}"
                done = self._at("response.function_call_arguments.done", name=item["name"], arguments=arguments)
                events.append(done)
        item["status"] = status
        events.append(self._about("response.output_item.done", item=_copied(item)))
        self._open = None
        return events

    def _at(self, kind: str, **fields: Any) -> Json:
        """An event about the open item's content."""
        return self._about(kind, item_id=self._item["id"], **fields)

    def _about(self, kind: str, **fields: Any) -> Json:
        """An event about the last item."""
        return {"type": kind, "output_index": len(self.response["output"]) - 1, **fields}

    def _snapshot(self, kind: str) -> Json:
        """An event with the response as it is now."""
        return {"type": kind, "response": self.response | {"output": [_copied(i) for i in self.response["output"]]}}


def _copied(item: Json) -> Json:
    parts = {key: [dict(part) for part in item[key]] for key in ("content", "summary") if key in item}
    return item | parts


def _envelope(request: ResponseRequest, request_id: str) -> Json:
    """The response before its output. What the request asked for is repeated, as at OpenAI."""
    given: Json = request.model_dump(mode="json", by_alias=True, exclude_none=True, include=_REPEATED)
    return {
        "id": f"{ResponseFormat.prefix}{request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "metadata": {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
        **dict.fromkeys(_NULL),
        **given,
    }


_NULL = (
    "error", "incomplete_details", "instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p",
    "usage", "user",
)  # fmt: skip
"""Fields that are null unless the request sets them, or the reply does."""
_REPEATED = {
    "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning", "temperature", "text", "tool_choice",
    "tools", "top_p", "user",
}  # fmt: skip
