"""The bytes of a remote reply in place of its tokens, which the endpoint does not tell."""

from penstock.services.domain.errors import unsupported
from penstock.services.reasoning import ReasoningFormat
from penstock.services.tool_calls.formats import ToolFormat
from penstock.types.prompts import Prompt
from penstock.worker_service.engine.remote.deltas import REASONING_FORMAT, TOOL_FORMAT
from penstock.worker_service.text.tokenizer import ByteTokenizer


class RemoteTokenizer(ByteTokenizer):
    """For replies alone: one token per byte of UTF-8, and no token ends a reply."""

    vocab_size = 256
    digest = "remote"
    eos_ids = frozenset[int]()
    characters_per_token: int | None = None
    tool_format: ToolFormat | None = TOOL_FORMAT
    reasoning_format: ReasoningFormat | None = REASONING_FORMAT

    def encode(self, prompt: Prompt, context_tokens: int | None = None) -> list[int]:
        """Raises:
        UnsupportedByModel: Always: the endpoint renders and tokenizes prompts.
        """
        raise unsupported("prompt", "this tier is a remote endpoint, whose tokens are not known")
