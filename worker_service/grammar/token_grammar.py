"""Grammars over a model's tokens, by llguidance (docs/adr/0034)."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from penstock.services.domain.errors import RequestFailed, invalid
from penstock.worker_service.grammar.source import GrammarSource
from penstock.worker_service.text.tokenizer import Tokenizer

# What one grammar may cost. By the library's own rates (docs/adr/0034): 10 ms to compile, 40 MB. Of steps it only bounds the
# lexer: an ambiguous grammar of two lines takes 100 ms at its 200th token, so time is bounded, too.
LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
MAX_STEPS_S, MAX_STEP_S = 0.5, 0.002
"""CPU time for the steps of one reply: so much in all, and so much more for each token. A wide schema takes a millisecond or
two at a step, most take a tenth of one."""
CHECKED_TOKENS = 16  # of a reply that is resumed, after which its time is looked at
MAX_ERROR_CHARS = 200
SPECIAL_NAME = b"<special-%d>"

Mask = npt.NDArray[np.int32]
"""(ceil(V / 32),) bits, one per token: bit t % 32 of element t // 32. Of drafts: (positions, ceil(V / 32))."""


class Vocabulary:
    """The model's tokens, as the library wants them."""

    def __init__(self, texts: list[bytes], eos_ids: Seq[int], encode: Callable[[bytes], list[int]]) -> None:
        """texts, eos_ids: as in `token_texts`; the library knows the first end. encode: tokens that spell a text."""
        self.eos_ids, self.eos_id = frozenset(eos_ids), eos_ids[0]
        wrapper = TokenizerWrapper(_Tokens(texts, self.eos_id, encode))
        self.tokenizer = LLTokenizer(wrapper, n_vocab=len(texts), eos_token=self.eos_id, slices=None)
        is_eos = np.zeros(-(-len(texts) // 32) * 32, bool)
        is_eos[list(eos_ids)] = True
        self.eos_mask: Mask = np.packbits(is_eos, bitorder="little").view(np.int32)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        return cls(*token_texts(tokenizer), lambda text: tokenizer.encode_text(text.decode("utf-8", "replace")))


class _Tokens:
    """What TokenizerWrapper asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, texts: list[bytes], eos_id: int, encode: Callable[[bytes], list[int]]) -> None:
        self.tokens, self.eos_token_id, self._encode = texts, eos_id, encode
        self.special_token_ids = [token for token, text in enumerate(texts) if text == SPECIAL_NAME % token]

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text)


def token_texts(tokenizer: Tokenizer) -> tuple[list[bytes], list[int]]:
    """(the text of each token, with names for those that have none; the tokens that end a reply, at least one)."""
    texts = [tokenizer.token_bytes(token) or SPECIAL_NAME % token for token in range(tokenizer.vocab_size)]
    return texts, sorted(tokenizer.eos_ids) or [tokenizer.vocab_size - 1]


class _Time:
    """CPU time that the steps of a reply have taken, within MAX_STEPS_S and MAX_STEP_S."""

    def __init__(self) -> None:
        self._left_s = MAX_STEPS_S
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._left_s -= time.thread_time() - self._began_s

    def tokens(self, count: int) -> None:
        """So many more tokens have come.

        Raises:
            RequestFailed: They took too long.
        """
        self._left_s += count * MAX_STEP_S
        if self._left_s < 0:
            raise RequestFailed(
                f"structured output: its steps take more than {MAX_STEPS_S:g} s, and {1000 * MAX_STEP_S:g} ms for each token"
            )


class TokenGrammar:
    """One reply's place in its grammar. Not thread-safe."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, time_taken: _Time | None = None) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._time = time_taken or _Time()

    def begun(self, output: Seq[int]) -> "TokenGrammar":
        """A reply of its own, after the tokens so far: they are all its state.

        Raises:
            InvalidRequest: they break the grammar.
            RequestFailed: finding out takes too long.
        """
        matcher, time_taken = self._matcher.deep_copy(), _Time()
        tokens = [token for token in output if token not in self._vocabulary.eos_ids]
        for start in range(0, len(tokens), CHECKED_TOKENS):
            part = tokens[start : start + CHECKED_TOKENS]
            with time_taken:
                taken = matcher.try_consume_tokens(part)
            if taken < len(part):
                raise invalid("resume_token_ids", f"token {start + taken} breaks the form that the reply must have")
            time_taken.tokens(len(part))
        return TokenGrammar(matcher, self._vocabulary, time_taken)

    def allowed(self) -> Mask:
        """Tokens that may come next: at least one.

        Raises:
            RequestFailed: none may, or finding out costs too much.
        """
        ends = self._vocabulary.eos_mask
        with self._time:
            mask: Mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(ends)].copy()
        self._check()
        if _has(mask, self._vocabulary.eos_id):
            mask |= ends
        if not mask.any():
            raise RequestFailed("no token fits the form that the reply must have")
        return mask

    def take(self, token: int) -> None:
        """A token has come.

        Raises:
            RequestFailed: it does not fit, or finding out costs too much.
        """
        if token in self._vocabulary.eos_ids:
            return
        with self._time:
            fits = self._matcher.consume_token(token)
        if not fits:
            self._check()
            raise RequestFailed("a token does not fit the form that the reply must have")
        self._time.tokens(1)

    def allowed_along(self, draft: Seq[int]) -> Mask:
        """Masks at each draft token and after the last: (len(draft) + 1, words). After a token that does not fit, and so
        cannot be accepted, every token is allowed."""
        masks = np.full((len(draft) + 1, len(self._vocabulary.eos_mask)), -1, np.int32)
        place = TokenGrammar(self._matcher.deep_copy(), self._vocabulary, self._time)
        for i, token in enumerate((*draft, None)):
            masks[i] = place.allowed()
            if token is None or token in self._vocabulary.eos_ids or not _has(masks[i], token):
                break
            place.take(token)
        return masks

    @property
    def possible(self) -> bool:
        """Whether any reply at all fits."""
        return self._matcher.is_accepting() or bool((self.allowed() & ~self._vocabulary.eos_mask).any())

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


def _has(mask: Mask, token: int) -> bool:
    return bool(mask[token // 32] >> (token % 32) & 1)


def _one_line(error: str) -> str:
    return " ".join(error.split())[:MAX_ERROR_CHARS]
