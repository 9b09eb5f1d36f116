"""Tokenizes and detokenizes texts of no request, without blocking the event loop."""

from collections.abc import Sequence as Seq

from penstock.services.domain.errors import PenstockError, invalid
from penstock.services.text_threads import TextThread, prompt_characters
from penstock.types.prompts import Prompt
from penstock.worker_service.text.tokenizer import Tokenizer

MAX_WAITING_CHARACTERS = 4_000_000
"""Two texts of the largest length: prompts of requests have threads of their own."""


class TextWork:
    """One thread for such texts; short ones are processed directly."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._thread = TextThread("tokenize-asked", MAX_WAITING_CHARACTERS)

    def close(self) -> None:
        self._thread.close()

    async def tokens(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt of any length.

        Raises:
            InvalidRequest: The model cannot process it.
            Overloaded: Too much text is waiting.
        """
        return await self._thread.run(prompt_characters(prompt), lambda: self._encoded(prompt))

    async def text(self, token_ids: Seq[int]) -> str:
        """The text of tokens that the model has.

        Raises:
            Overloaded: Too much text is waiting.
        """
        return await self._thread.run(len(token_ids), lambda: self._tokenizer.decode(token_ids))

    def _encoded(self, prompt: Prompt) -> list[int]:
        try:
            return self._tokenizer.encode(prompt)
        except PenstockError:
            raise
        except Exception as error:  # the library's: caused by this text
            raise invalid("prompt", "cannot be tokenized") from error
