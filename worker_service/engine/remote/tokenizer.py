"""The bytes of a remote reply in place of its tokens, which the endpoint does not tell."""

from collections.abc import Sequence as Seq

from services.domain.errors import FieldProblem, UnsupportedByModel
from services.domain.requests import Prompt
from worker_service.engine.remote.deltas import REASONING_FORMAT, TOOL_FORMAT
from worker_service.text.tokenizer import ByteTokenizer, TokenStream


class RemoteTokenizer:
    """As a Tokenizer, for replies alone: one token per byte of UTF-8, and no token ends a reply."""

    vocab_size = 256
    eos_ids: frozenset[int] = frozenset()
    digest = "remote"
    characters_per_token = None
    tool_format = TOOL_FORMAT
    reasoning_format = REASONING_FORMAT

    def encode(self, prompt: Prompt, context_tokens: int | None = None) -> list[int]:
        """Raises:
        UnsupportedByModel: Always: the endpoint renders and tokenizes prompts.
        """
        raise UnsupportedByModel(FieldProblem("prompt", "this tier is a remote endpoint, whose tokens are not known"))

    def encode_text(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def stream(self) -> TokenStream:
        return ByteTokenizer().stream()

    def decode(self, token_ids: Seq[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])
