"""Token frames of several replies as columns of one message."""

from penstock.proto.worker.v1 import worker_pb2 as pb
from services.domain.requests import TokenFrame

MAX_ROW_BYTES, MAX_TOKEN_BYTES, MAX_CHARACTER_BYTES = 32, 5, 4
"""Largest sizes of a row, a token id and a character of text in a message."""


class TokenColumns:
    """Rows of frames without logprobs. bytes: largest size in a message."""

    __slots__ = ("_counts", "_offsets", "_reply_ids", "_texts", "_token_ids", "bytes")

    def __init__(self) -> None:
        self._reply_ids: list[int] = []
        self._offsets: list[int] = []
        self._counts: list[int] = []
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self.bytes = 0

    @staticmethod
    def row_bytes(frame: TokenFrame) -> int:
        return MAX_ROW_BYTES + MAX_TOKEN_BYTES * len(frame.token_ids) + MAX_CHARACTER_BYTES * len(frame.text)

    def add(self, reply_id: int, frame: TokenFrame, size: int) -> None:
        """Add a row. size: its `row_bytes`."""
        self._reply_ids.append(reply_id)
        self._offsets.append(frame.offset)
        self._counts.append(len(frame.token_ids))
        self._texts.append(frame.text)
        self._token_ids += frame.token_ids
        self.bytes += size

    def to_proto(self) -> pb.ReplyEvent:
        columns = pb.TokenColumns(
            reply_ids=self._reply_ids,
            offsets=self._offsets,
            token_counts=self._counts,
            texts=self._texts,
            token_ids=self._token_ids,
        )
        return pb.ReplyEvent(token_columns=columns)
