"""Tokenizes prompts without blocking the event loop."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from penstock.services.domain.errors import AlreadyRunning, PenstockError, Unavailable
from penstock.services.text_threads import INLINE_CHARACTERS, TextThread
from penstock.types.prompts import ChatPrompt, Prompt, TextPrompt
from penstock.worker_service.text.request_failures import request_failed
from penstock.worker_service.text.tokenizer import Tokenizer, check_characters

_T = TypeVar("_T")


class EncodingAborted(Exception):
    """The request was aborted before its prompt was tokenized."""


@dataclass(slots=True)
class _Pending:
    result: "asyncio.Future[Any]"
    aborted: bool = False


class PromptEncoder:
    """Tokenizes short prompts directly and long ones on threads, in order of arrival.

    Continued replies (migrated or resumed) have a separate thread, so that long new prompts do not delay them.
    """

    def __init__(self, tokenizer: Tokenizer, context_tokens: int) -> None:
        self._tokenizer, self._context_tokens = tokenizer, context_tokens
        self._new, self._continued = TextThread("tokenize-new"), TextThread("tokenize-continued")
        self._pending: dict[str, _Pending] = {}
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
        if request_id in self._pending:
            raise AlreadyRunning(request_id)
        characters = _characters(prompt)
        if isinstance(prompt, TextPrompt):
            check_characters(self._tokenizer, characters, self._context_tokens)
        work = partial(self._tokenizer.encode, prompt, self._context_tokens)
        return await self.run(request_id, characters, work, continued=continued)

    async def run(self, request_id: str, characters: int, work: Callable[[], _T], *, continued: bool = False) -> _T:
        """Do other work on a text of a request in the same way. Raises as `encode`."""
        if request_id in self._pending:
            raise AlreadyRunning(request_id)

        def guarded() -> _T:
            try:
                return work()
            except PenstockError:
                raise
            except BaseException as error:  # a panic in the native code of a tokenizer is not an Exception
                raise request_failed(request_id, error) from error

        if characters <= INLINE_CHARACTERS:
            return guarded()
        thread = self._continued if continued else self._new
        pending = _Pending(thread.submit(characters, guarded))
        self._pending[request_id] = pending
        try:
            result: _T = await pending.result
            return result
        except asyncio.CancelledError:
            if pending.aborted:
                raise EncodingAborted from None
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                raise Unavailable("the engine has stopped") from None
            raise
        finally:
            del self._pending[request_id]

    async def encode_ahead(self, transfer_id: str, request_id: str, prompt: Prompt) -> None:
        """Tokenize the prompt of a request that is arriving, for `encode_arrived`. Raises what `encode` raises."""
        self._ahead[transfer_id] = await self.encode(request_id, prompt, continued=True)

    async def encode_arrived(self, transfer_id: str, request_id: str, prompt: Prompt) -> list[int]:
        """The token ids of the prompt of a request that has arrived: at once, if they were encoded ahead."""
        ids = self._ahead.pop(transfer_id, None)
        return ids if ids is not None else await self.encode(request_id, prompt, continued=True)

    def forget(self, transfer_id: str) -> None:
        """Drop what was encoded ahead for a request that does not arrive; no error if there is nothing."""
        self._ahead.pop(transfer_id, None)

    def abort(self, request_id: str) -> bool:
        """End a request whose prompt is being tokenized; False if there is none."""
        pending = self._pending.get(request_id)
        if pending is None:
            return False
        pending.aborted = True
        pending.result.cancel()
        return True

    def close(self) -> None:
        """End all waiting requests with Unavailable."""
        self._new.close()
        self._continued.close()
        for pending in self._pending.values():
            pending.result.cancel()


def _characters(prompt: Prompt) -> int:
    """Number of characters to tokenize; 0 for a prompt of token ids."""
    match prompt:
        case TextPrompt(text):
            return len(text)
        case ChatPrompt(messages):
            return prompt.characters + sum(len(m.role) + 1 for m in messages)
    return 0
