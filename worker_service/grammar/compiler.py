"""Compiles grammars outside the event loop and the engine's thread."""

from collections import OrderedDict
from collections.abc import Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING

from penstock.services.domain.errors import InvalidRequest
from penstock.services.text_threads import TextThread
from penstock.types.requests import GenerationRequest
from penstock.worker_service.grammar.source import GrammarSource, grammar_characters, reply_grammar
from penstock.worker_service.grammar.trials import GrammarTrials
from penstock.worker_service.text.request_failures import guarded
from penstock.worker_service.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.worker_service.grammar.token_grammar import TokenGrammar, Vocabulary

MAX_COMPILED = 32
"""Grammars that are kept; the longest unused is forgotten first. Agents send the same few with every request."""
MAX_WAITING_CHARACTERS = 1_000_000
"""Of grammars that wait to be compiled: two requests with the most tools that are allowed."""


class GrammarCompiler:
    """One for a worker: a thread of its own, on which the library releases the GIL, and what it has compiled lately."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._form = tokenizer, tokenizer.tool_format
        self._thread = TextThread("grammars", MAX_WAITING_CHARACTERS)
        self._trials = GrammarTrials(self._token_texts)
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[str, TokenGrammar] = OrderedDict()

    async def compile(self, request: GenerationRequest, output: Seq[int]) -> "TokenGrammar | None":
        """The grammar of a request's reply, after the `output` that there is already; None where it has none.

        Raises:
            InvalidRequest: it cannot be enforced; names the field.
            UnsupportedByModel: tools are offered to a model that takes none.
            Overloaded: too much is waiting to be compiled.
            RequestFailed: the library fails.
        """
        characters = grammar_characters(request, self._form) if request.has_form else 0
        if not characters:
            return None
        try:
            source = await self._thread.submit(characters, lambda: reply_grammar(request, self._form))
        except InvalidRequest:
            await self._trials.refused(request.cache_salt)
            raise
        if source.text not in self._compiled:
            await self._trials.check(source, request.cache_salt)
        begin = partial(guarded, request.request_id, lambda: self._get(source).begun(output))
        return await self._thread.submit(characters, begin)

    async def close(self) -> None:
        self._thread.close()
        await self._trials.close()

    def _token_texts(self) -> tuple[list[bytes], list[int]]:
        from penstock.worker_service.grammar.token_grammar import token_texts

        return token_texts(self._tokenizer)

    def _get(self, source: GrammarSource) -> "TokenGrammar":
        """A compiled grammar; the thread's."""
        from penstock.worker_service.grammar.token_grammar import Vocabulary, compiled  # it loads a library

        known = self._compiled.get(source.text)
        if known is not None:
            self._compiled.move_to_end(source.text)
            return known
        if self._vocabulary is None:
            self._vocabulary = Vocabulary.of(self._tokenizer)
        grammar = self._compiled[source.text] = compiled(source, self._vocabulary)
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return grammar
