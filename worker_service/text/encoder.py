"""Tokenizes prompts without blocking the event loop."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from penstock.services.domain.errors import AlreadyRunning, NotFound, Unavailable
from penstock.services.text_threads import INLINE_CHARACTERS, TextThread, prompt_characters
from penstock.types.prompts import Prompt, TextPrompt
from penstock.worker_service.text.request_failures import guarded
from penstock.worker_service.text.tokenizer import Tokenizer, check_characters

_T = TypeVar("_T")


class EncodingAborted(Exception):
    """The request was aborted before its prompt was tokenized."""


class PromptEncoder:
    """Tokenizes short prompts directly and long ones on threads, in order of arrival.

    Continued replies (migrated or resumed) have a separate thread, so that long new prompts do not delay them.
    """

    def __init__(self, tokenizer: Tokenizer, context_tokens: int) -> None:
        self._tokenizer, self._context_tokens = tokenizer, context_tokens
        self._new, self._continued = TextThread("tokenize-new"), TextThread("tokenize-continued")
        self._pending: dict[str, asyncio.Future[Any]] = {}  # by request; an aborted one has left
        self._ahead: dict[str, list[int]] = {}  # by transfer: prompts of requests that are arriving

    async def encode(self, request_id: str, prompt: Prompt, *, continued: bool = False) -> list[int]:
        """The token ids of a prompt. Can be cancelled.

        Raises:
            PromptTooLong: It leaves no room for a reply. A prompt that is too long by its characters is not tokenized.
            InvalidRequest: The model cannot process it.
            AlreadyRunning: A prompt of this request is being tokenized.
            Overloaded: Too many characters are waiting to be tokenized.
            RequestFailed: It cannot be tokenized.
            EncodingAborted: `abort` was called.
            Unavailable: `close` was called.
        """
        characters = prompt_characters(prompt)
        if isinstance(prompt, TextPrompt):
            check_characters(self._tokenizer, characters, self._context_tokens)
        work = partial(self._tokenizer.encode, prompt, self._context_tokens)
        return await self.run(request_id, characters, work, continued=continued)

    async def run(self, request_id: str, characters: int, work: Callable[[], _T], *, continued: bool = False) -> _T:
        """Do other work on a text of a request in the same way. Raises as `encode`."""
        if request_id in self._pending:
            raise AlreadyRunning(request_id)
        if characters <= INLINE_CHARACTERS:
            return guarded(request_id, work)
        thread = self._continued if continued else self._new
        result = thread.submit(characters, partial(guarded, request_id, work))
        self._pending[request_id] = result
        try:
            return await result
        except asyncio.CancelledError:
            if self._pending.get(request_id) is not result:
                raise EncodingAborted from None
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                raise Unavailable("the engine has stopped") from None
            raise
        finally:
            if self._pending.get(request_id) is result:
                del self._pending[request_id]

    async def encode_ahead(self, transfer_id: str, request_id: str, prompt: Prompt) -> None:
        """Tokenize the prompt of a request that is arriving, for `encode_arrived`, as which it raises."""
        self._ahead[transfer_id] = await self.encode_arrived(transfer_id, request_id, prompt)

    async def encode_arrived(self, transfer_id: str, request_id: str, prompt: Prompt) -> list[int]:
        """The token ids of the prompt of a request that has arrived: at once, if they were encoded ahead.

        Raises:
            NotFound: `abort` was called. Otherwise as `encode`.
        """
        if (ids := self._ahead.pop(transfer_id, None)) is not None:
            return ids
        try:
            return await self.encode(request_id, prompt, continued=True)
        except EncodingAborted:
            raise NotFound("request", request_id) from None

    def forget(self, transfer_id: str) -> None:
        """Drop what was encoded ahead for a request that does not arrive; no error if there is nothing."""
        self._ahead.pop(transfer_id, None)

    def abort(self, request_id: str) -> bool:
        """End a request whose prompt is being tokenized; False if there is none."""
        result = self._pending.pop(request_id, None)
        return result is not None and result.cancel()

    def close(self) -> None:
        """End all waiting requests with Unavailable."""
        self._new.close()
        self._continued.close()
        for result in self._pending.values():
            result.cancel()
