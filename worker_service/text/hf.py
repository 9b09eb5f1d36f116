"""Tokenizers of models in Hugging Face format, and of GGUF files."""

import hashlib
import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerFast

from penstock.services.domain.errors import invalid, unsupported
from penstock.services.gguf import is_gguf
from penstock.services.prompt_bounds import byte_alphabet, characters_per_token, parts
from penstock.services.reasoning import ReasoningFormat, format_of_template
from penstock.services.tool_calls.formats import FORMATS, ToolFormat
from penstock.services.tool_calls.formats import format_of_template as tool_format_of_template
from penstock.services.tool_calls.rendering import encodable, template_chat
from penstock.types.prompts import NO_EFFORT, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from penstock.worker_service.text.decoding import BYTE_TOKEN, WindowStream, byte_level_stream
from penstock.worker_service.text.gguf import gguf_tokenizer
from penstock.worker_service.text.tokenizer import TokenStream, check_characters, check_tokens, checked_ids

THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates switch reasoning: Qwen 3's and GLM 4.5's, and DeepSeek V3.1's and Granite's."""
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer", "Qwen2TokenizerFast")
"""Tokenizers that are all in tokenizer.json; other classes may change what it says."""
MAX_TEMPLATE_MESSAGE_CHARS = 200  # of the error message of a template


class HfTokenizer:
    """The tokenizer of a model folder or of a GGUF file, with its chat template and end-of-sequence tokens."""

    def __init__(self, source: Path, vocab_size: int | None = None, tool_format: str = "auto") -> None:
        """vocab_size: of the model, if its embedding is larger or smaller than the vocabulary of the tokenizer.

        tool_format: how the model writes tool calls, as in the tier of the mesh file.
        """
        if is_gguf(source):
            loaded, self.eos_ids = gguf_tokenizer(source)
        else:
            loaded = _loaded(source)
            self.eos_ids = _eos_ids(source, loaded)
        self._tokenizer = loaded
        self._backend = loaded.backend_tokenizer
        self.vocab_size = vocab_size or len(loaded)
        self._backend.no_truncation()
        self._backend.no_padding()
        serialised = self._backend.to_str()
        self.digest = hashlib.sha256(serialised.encode()).hexdigest()[:16]
        content = json.loads(serialised)
        self.characters_per_token = characters_per_token(content)
        kinds = {part["type"] for part in parts(content.get("decoder"), "decoders")}
        self._byte_of = byte_alphabet() if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"} else None
        self._joins_bytes = "ByteLevel" in kinds
        self._byte_tokens = _byte_tokens(self._backend.get_vocab()) if "ByteFallback" in kinds else {}
        self.tool_format = _tool_format(loaded.chat_template, tool_format)
        self._template = loaded.chat_template if isinstance(loaded.chat_template, str) else ""
        self.reasoning_format = _reasoning_format(loaded, self._template)
        added = self._backend.get_added_tokens_decoder().items()
        self._special = frozenset(loaded.all_special_ids) | {token_id for token_id, token in added if token.special}

    def has_tokens_of(self, other: "HfTokenizer") -> bool:
        """Whether each token of `other` is the same token here."""
        return bool(self._backend.get_vocab() == other._backend.get_vocab())

    def encode(self, prompt: Prompt, context_tokens: int | None = None) -> list[int]:
        match prompt:
            case TokenPrompt():
                return checked_ids(prompt, self.vocab_size, context_tokens)
            case TextPrompt(text):
                return self._ids(encodable(text), context_tokens, special=True)
            case ChatPrompt():
                return self._ids(self._rendered(prompt), context_tokens, special=False)

    def encode_text(self, text: str) -> list[int]:
        return self._ids(encodable(text), None, special=False)

    def _rendered(self, prompt: ChatPrompt) -> str:
        """The chat, rendered by the template of the model."""
        if not self._tokenizer.chat_template:
            raise invalid("prompt.chat", "this model has no chat template: send text or token ids")
        if prompt.tool_use.offered and self.tool_format is None:
            raise unsupported("prompt.chat.tool_use.tools", "this model's chat template takes no tools")
        options = self._reasoning_options(prompt)
        chat, tools = template_chat(prompt)
        render = self._tokenizer.apply_chat_template
        try:
            return encodable(str(render(chat, tools=tools, tokenize=False, add_generation_prompt=True, **options)))
        except Exception as error:  # templates are code: any error is caused by these messages
            cause = type(error).__name__
            if isinstance(error, TemplateError):
                cause = str(error)[:MAX_TEMPLATE_MESSAGE_CHARS]
            problem = f"the model's chat template refuses them: {cause}"
            if self.tool_format is None and any(m.tool_calls or m.role == "tool" for m in prompt.messages):
                raise unsupported("prompt.chat.messages", problem) from None
            raise invalid("prompt.chat.messages", problem) from None

    def _reasoning_options(self, prompt: ChatPrompt) -> dict[str, Any]:
        """What to tell the template about reasoning.

        Raises:
            UnsupportedByModel: The template cannot do what the request asks for.
        """
        wish, effort = prompt.wants_reasoning, prompt.reasoning_effort
        if wish is None:
            return {}
        options: dict[str, Any] = {name: wish for name in THINKING_SWITCHES if name in self._template}
        if effort and effort != NO_EFFORT:
            if "reasoning_effort" not in self._template:
                problem = "this model's chat template has no levels of effort"
                raise unsupported("prompt.chat.reasoning_effort", problem)
            options["reasoning_effort"] = effort
        if not options and wish is not (self.reasoning_format is not None):  # it always reasons, or never
            field = "prompt.chat.thinking" if prompt.thinking is not None else "prompt.chat.reasoning_effort"
            problem = f"this model's chat template cannot switch its reasoning {'on' if wish else 'off'}"
            raise unsupported(field, problem)
        return options

    def _ids(self, text: str, context_tokens: int | None, *, special: bool) -> list[int]:
        """Tokenize with the batch call, which releases the GIL; `encode` holds it."""
        check_characters(self, len(text), context_tokens)
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
        check_tokens(len(encoded), context_tokens)
        return list(encoded.ids)

    def stream(self) -> TokenStream:
        if self._byte_of is not None:
            return byte_level_stream(self.token_bytes)
        is_skipped, open_ids, lossy = self._is_skipped, self._byte_tokens, self._joins_bytes
        return WindowStream(self.decode, is_skipped=is_skipped, open_ids=open_ids, lossy=lossy).step

    def decode(self, token_ids: Seq[int]) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        if self._is_skipped(token_id):
            return b""
        piece = self._backend.id_to_token(token_id)
        if self._byte_of is not None:
            try:
                return bytes([self._byte_of[char] for char in piece])
            except KeyError:  # an added token, which represents its own text
                return str(piece).encode()
        if token_id in self._byte_tokens:
            return bytes([self._byte_tokens[token_id]])
        return str(self._backend.decode([token_id], skip_special_tokens=False)).encode()

    def _is_skipped(self, token_id: int) -> bool:
        """Whether decoding skips a token: a special token, or a row of the embedding without a token."""
        return token_id in self._special or self._backend.id_to_token(token_id) is None


def _loaded(folder: Path) -> PreTrainedTokenizerFast:
    """The folder's tokenizer.

    Raises:
        ValueError: It has no fast one.
    """
    settings = folder / "tokenizer_config.json"
    kind = json.loads(settings.read_text()).get("tokenizer_class") if settings.exists() else None
    if kind in GENERIC_CLASSES and (folder / "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    from transformers import AutoTokenizer  # seconds of imports

    loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    if not isinstance(loaded, PreTrainedTokenizerFast):
        raise ValueError(f"{folder}: a fast tokenizer (tokenizer.json) is required")
    return loaded


def _tool_format(template: object, stated: str) -> ToolFormat | None:
    """The stated format, or what the template says; None where the template takes no tools."""
    if not isinstance(template, str) or "tools" not in template:
        return None
    return FORMATS[stated] if stated != "auto" else tool_format_of_template(template)


def _reasoning_format(tokenizer: PreTrainedTokenizerFast, template: str) -> ReasoningFormat | None:
    """How the template marks reasoning, by what it renders. A template that refuses the question has the usual marks."""

    def rendered(thinking: bool | None) -> str:
        options = {} if thinking is None else dict.fromkeys(THINKING_SWITCHES, thinking)
        chat = [{"role": "user", "content": "?"}]
        try:
            return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options))
        except Exception:
            return ""

    return format_of_template(template, rendered) if template else None


def _eos_ids(folder: Path, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """The end-of-sequence tokens from generation_config.json, or of the tokenizer without that file."""
    file = folder / "generation_config.json"
    if file.exists():
        ids = json.loads(file.read_text()).get("eos_token_id")
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset() if tokenizer.eos_token_id is None else frozenset({int(tokenizer.eos_token_id)})


def _byte_tokens(vocab: Mapping[str, int]) -> dict[int, int]:
    """Id -> byte of the tokens named like `<0x0A>`."""
    return {token_id: int(match[1], 16) for token, token_id in vocab.items() if (match := BYTE_TOKEN.fullmatch(token))}
