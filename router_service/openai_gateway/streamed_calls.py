"""A reply to a request with tools as server-sent events: its calls are streamed in pieces, in addition to its text."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from router_service.domain.events import Finished, RouterEvent
from router_service.openai_gateway import replies
from router_service.openai_gateway.streamed_replies import StreamedReply
from router_service.openai_gateway.tools import Json, ToolDeltas
from services.domain.requests import TokenFrame
from services.tool_calls import ToolFormat


class StreamedCalls(StreamedReply):
    """Like StreamedReply. The output of a tier whose format of calls is unknown is passed on as text."""

    def __init__(
        self, *arguments: Any, request_ids: Seq[str], tool_format: Callable[[str], ToolFormat | None], **more: Any
    ) -> None:
        """request_ids: of each choice. tool_format: how a tier's model writes calls. The rest is StreamedReply's."""
        super().__init__(*arguments, **more)
        self._request_ids, self._tool_format = request_ids, tool_format
        self._calling: list[ToolDeltas | None] = [None] * len(request_ids)

    def answer(self, index: int, tier: str, frame: TokenFrame) -> None:
        if self._calling[index] is None and (form := self._tool_format(tier)) is not None:
            self._calling[index] = ToolDeltas(form, self._request_ids[index])
        deltas = self._calling[index]
        if deltas is None:
            super().answer(index, tier, frame)
            return
        self._open_once()
        self._pieces(index, deltas.push(frame.text), frame if self._logprobs else None)

    def event(self, index: int, event: RouterEvent) -> None:
        deltas = self._calling[index]
        if isinstance(event, Finished) and deltas is not None:
            self._pieces(index, deltas.finish(), None)
        super().event(index, event)

    def _pieces(self, index: int, pieces: list[Json], frame: TokenFrame | None) -> None:
        for delta in replies.tool_deltas(index, pieces, frame):
            self._json(self._base | {"choices": [delta]})
