"""Token frames of several replies as columns of one message."""

from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.types.replies import TokenFrame

MAX_ROW_BYTES, MAX_TOKEN_BYTES, MAX_CHARACTER_BYTES = 32, 5, 4
"""Largest sizes of a row, a token id and a character of text in a message."""


class TokenColumns:
    """Rows of frames without logprobs. event: its message. bytes: largest size in a message."""

    __slots__ = ("_columns", "bytes", "event")

    def __init__(self) -> None:
        self.event, self.bytes = pb.ReplyEvent(), 0
        rows = self.event.token_columns
        self._columns = rows.reply_ids, rows.offsets, rows.token_counts, rows.texts, rows.token_ids

    @staticmethod
    def row_bytes(frame: TokenFrame) -> int:
        return MAX_ROW_BYTES + MAX_TOKEN_BYTES * len(frame.token_ids) + MAX_CHARACTER_BYTES * len(frame.text)

    def add(self, reply_id: int, frame: TokenFrame, size: int) -> None:
        """Add a row. size: its `row_bytes`."""
        reply_ids, offsets, counts, texts, token_ids = self._columns
        reply_ids.append(reply_id)
        offsets.append(frame.offset)
        counts.append(len(frame.token_ids))
        texts.append(frame.text)
        token_ids.extend(frame.token_ids)
        self.bytes += size
