"""A reply of a server, as far as it has arrived. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from penstock.types.replies import FinishReason
from penstock.types.requests import GenerationRequest
from penstock.worker_service.engine import reply_rules
from penstock.worker_service.engine.sglang.client import Piece
from penstock.worker_service.text.reply import ReplyText
from penstock.worker_service.text.tokenizer import Tokenizer


@dataclass(slots=True)
class ServerReply:
    """most: output tokens at most. output: tokens so far, those of a resumed reply included. reason: why it has ended; None
    before that. cached: prompt tokens whose KV the server had. generating: whether the server is at work on it."""

    request: GenerationRequest
    prompt_tokens: int
    most: int
    text: ReplyText
    tokenizer: Tokenizer
    output: list[int]
    reason: FinishReason | None = None
    cached: int = 0
    preemptions: int = 0
    compute_s: float = 0.0
    generating: bool = False

    @classmethod
    def begun(
        cls, request: GenerationRequest, prompt: Sequence[int], context_tokens: int, tokenizer: Tokenizer
    ) -> Self:
        """The reply before its first piece; a resumed one may have ended.

        Raises:
            PromptTooLong: There is no room for a reply.
        """
        most = reply_rules.reply_room(request, prompt, context_tokens, tokenizer)
        text, output = reply_rules.resumed_text(request, tokenizer), list(request.resume_token_ids)
        reply = cls(request, len(prompt), most, text, tokenizer, output)
        if output:
            reply.reason = reply._end_reason(output[-1], len(output))
        return reply

    def take(self, piece: Piece) -> tuple[list[int], str]:
        """The tokens and the text of a piece; what comes after the end of the reply is dropped."""
        self.cached = max(self.cached, min(piece.cached_tokens, self.prompt_tokens))
        self.preemptions = max(self.preemptions, piece.retractions)
        before, ids, text = len(self.output), list[int](), ""
        for token in piece.token_ids:
            ids.append(token)
            text += self.text.push(token)
            self.reason = self._end_reason(token, before + len(ids))
            if self.reason is not None:
                break
        if self.reason is None and piece.finish is not None:
            self.reason = FinishReason.ABORTED if piece.finish == "abort" else FinishReason(piece.finish)
        if self.reason is not None:
            text += self.text.finish()
        self.output += ids
        return ids, text

    def _end_reason(self, token: int, count: int) -> FinishReason | None:
        return reply_rules.end_reason(self.text, token, count, self.most, self.request.sampling, self.tokenizer)
