"""Grammars over a model's tokens, by llguidance (docs/adr/0034)."""

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from services.domain.errors import RequestFailed, invalid
from worker_service.grammar.source import GrammarSource
from worker_service.text import Tokenizer

# What one grammar may cost. By the library's own rates (docs/adr/0034): 10 ms to compile, 7 ms and 1 ms at each step, 40 MB.
LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
MAX_ERROR_CHARS = 200

Mask = npt.NDArray[np.int32]
"""(ceil(V / 32),) bits, one per token: bit t % 32 of element t // 32. Of drafts: (positions, ceil(V / 32))."""


class Vocabulary:
    """The model's tokens, as the library wants them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        eos = sorted(tokenizer.eos_ids) or [tokenizer.vocab_size - 1]
        self.eos_ids, self.size = frozenset(eos), tokenizer.vocab_size
        self.tokenizer = LLTokenizer(
            TokenizerWrapper(_Tokens(tokenizer, eos[0])), n_vocab=self.size, eos_token=eos[0], slices=None
        )
        self.eos_id = eos[0]


class TokenGrammar:
    """One reply's place in its grammar. Not thread-safe."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def begun(self, output: Seq[int]) -> "TokenGrammar":
        """A reply of its own, behind the tokens so far: they are all its state.

        Raises:
            InvalidRequest: they break the grammar.
        """
        matcher = self._matcher.deep_copy()
        tokens = [token for token in output if token not in self._vocabulary.eos_ids]
        taken = matcher.try_consume_tokens(tokens) if tokens else 0
        if taken < len(tokens):
            raise invalid("resume_token_ids", f"token {taken} breaks the form that the reply must have")
        return TokenGrammar(matcher, self._vocabulary)

    def allowed(self) -> Mask:
        """Tokens that may come next: at least one.

        Raises:
            RequestFailed: none may, or finding out costs too much.
        """
        words = -(-self._vocabulary.size // 32)
        mask: Mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[:words].copy()
        self._check()
        if _has(mask, self._vocabulary.eos_id):
            for token in self._vocabulary.eos_ids:
                mask[token // 32] |= np.int32(np.uint32(1 << token % 32).view(np.int32))
        if not mask.any():
            raise RequestFailed("no token fits the form that the reply must have")
        return mask

    def take(self, token: int) -> None:
        """A token has come.

        Raises:
            RequestFailed: it does not fit, or finding out costs too much.
        """
        if token not in self._vocabulary.eos_ids and not self._matcher.consume_token(token):
            self._check()
            raise RequestFailed("a token does not fit the form that the reply must have")

    def allowed_along(self, draft: Seq[int]) -> Mask:
        """Masks at each draft token and behind the last: (len(draft) + 1, words). Behind a token that does not fit, and so
        cannot stand, every token is allowed."""
        masks = np.full((len(draft) + 1, -(-self._vocabulary.size // 32)), -1, np.int32)
        place = TokenGrammar(self._matcher.deep_copy(), self._vocabulary)
        for i, token in enumerate((*draft, None)):
            masks[i] = place.allowed()
            if token is None or token in self._vocabulary.eos_ids or not _has(masks[i], token):
                break
            place.take(token)
        return masks

    @property
    def possible(self) -> bool:
        """Whether any reply at all fits."""
        if self._matcher.is_accepting():
            return True
        mask = self.allowed()
        for token in self._vocabulary.eos_ids:
            mask[token // 32] &= ~np.int32(np.uint32(1 << token % 32).view(np.int32))
        return bool(mask.any())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestFailed(f"structured output: {_one_line(self._matcher.get_error())}")


def compiled(source: GrammarSource, vocabulary: Vocabulary) -> TokenGrammar:
    """A grammar, ready for replies to begin.

    Raises:
        InvalidRequest: it cannot be compiled, costs too much, or no reply fits it; names the field.
    """
    matcher = LLMatcher(vocabulary.tokenizer, source.text, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise invalid(source.field, f"cannot be enforced: {_one_line(matcher.get_error())}")
    grammar = TokenGrammar(matcher, vocabulary)
    try:
        possible = grammar.possible
    except RequestFailed as error:
        raise invalid(source.field, f"cannot be enforced: {error}") from None
    if not possible:
        raise invalid(source.field, "cannot be enforced: no reply fits it")
    return grammar


class _Tokens:
    """What TokenizerWrapper asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = [token for token, text in enumerate(self.tokens) if not text]
        for token in self.special_token_ids:
            self.tokens[token] = b"<special-%d>" % token

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode_text(text.decode("utf-8", "replace"))


def _has(mask: Mask, token: int) -> bool:
    return bool(mask[token // 32] >> (token % 32) & 1)


def _one_line(error: str) -> str:
    return " ".join(error.split())[:MAX_ERROR_CHARS]
