"""Makes the draft of a request a source of proposed tokens, without blocking the event loop."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from penstock.services.domain.errors import PenstockError
from penstock.types.requests import MAX_DRAFT_TOKENS, Draft
from penstock.worker_service.speculation.given_answer import GivenAnswer, RunAcceptance
from penstock.worker_service.speculation.sources import DraftSource
from penstock.worker_service.text.encoder import PromptEncoder
from penstock.worker_service.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class GivenAnswers:
    """The given answers of one engine."""

    def __init__(self, tokenizer: Tokenizer, encoder: PromptEncoder, price: Callable[[], float]) -> None:
        """price: of one more row at this moment, as in `windows.row_price`."""
        self._tokenizer, self._encoder, self._price = tokenizer, encoder, price
        self._acceptance = RunAcceptance()

    async def source(self, request_id: str, draft: Draft | None, output: Sequence[int]) -> DraftSource | None:
        """The source for a reply whose first tokens are `output`; None without a draft.

        A draft that cannot be used never fails its request: it is ignored, and None is returned.

        Raises:
            EncodingAborted: `PromptEncoder.abort` was called.
        """
        if draft is None or (draft.token_ids and draft.tokenizer_digest != self._tokenizer.digest):
            return None
        length = len(draft.text) + len(draft.token_ids) + len(output)
        aligned = partial(self._aligned, draft, output)
        try:
            return await self._encoder.run(request_id, length, aligned, continued=bool(output))
        except PenstockError as error:  # too many texts wait, or the tokenizer cannot encode this one
            _log.info("%s: its draft is ignored: %s", request_id, type(error).__name__)
            return None

    def _aligned(self, draft: Draft, output: Sequence[int]) -> GivenAnswer:
        answer = draft.token_ids or self._tokenizer.encode_text(draft.text)
        given = GivenAnswer(answer[:MAX_DRAFT_TOKENS], self._acceptance, self._price)
        given.align(output[-MAX_DRAFT_TOKENS:])  # of a longer reply, its end is enough to find the place
        return given
