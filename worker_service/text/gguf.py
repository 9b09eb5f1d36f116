"""The tokenizer, chat template and end tokens that a GGUF file holds."""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from penstock.services.gguf import read_metadata
from penstock.services.reasoning import REASONING_FORMATS
from penstock.services.tool_calls.formats import FORMATS

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # of tokenizer.ggml.token_type
_END_NAMES = {
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|eot|>",
    "<end_of_turn>",
}
"""Control tokens that end a reply whatever the file says, as in llama.cpp."""
_MARKS = frozenset(mark for form in FORMATS.values() for mark in (form.begin, form.end) if mark) | frozenset(
    mark for marks in REASONING_FORMATS.values() for mark in (marks.begin, marks.end)
)
"""Tokens that are read from replies. Files written by older converters call them control tokens, as if they had no text."""

_SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",)
_QWEN2 = (rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",)
_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_SPLITS = (
    dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "dbrx", "smaug-bpe"), _LLAMA3)
    | dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN2)
    | dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), _GPT2)
    | dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", *_GPT2))
)
"""How text is cut before byte pairs are joined, by tokenizer.ggml.pre: llama.cpp's expressions, applied in turn."""


class UnknownTokenizer(ValueError):
    """A tokenizer that cannot be built from the file; the message says which."""


def gguf_tokenizer(file: Path) -> tuple[PreTrainedTokenizerFast, frozenset[int]]:
    """The tokenizer and the tokens that end a reply.

    Raises:
        UnknownTokenizer: It is none of those that are built here.
        NotGguf: The file is damaged.
    """
    metadata = read_metadata(file)
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    kind, cut = values.get("model"), values.get("pre", "")
    if kind != "gpt2" or cut not in _SPLITS:
        raise UnknownTokenizer(f"{file}: tokenizer '{kind}' with pre-tokenizer '{cut}' is not known")
    tokens: list[str] = values["tokens"]
    types: list[int] = values.get("token_type") or [_NORMAL] * len(tokens)
    vocabulary = {token: i for i, (token, type_) in enumerate(zip(tokens, types, strict=True)) if type_ != _UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in values.get("merges", ())]
    backend = Tokenizer(BPE(vocabulary, merges, ignore_merges=cut in ("llama3", "llama-v3", "llama-bpe")))
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in _SPLITS[cut]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, special=type_ == _CONTROL and token not in _MARKS, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in (_CONTROL, _USER_DEFINED)
        ]
    )
    named = {name: values.get(f"{name}_token_id") for name in ("bos", "eos", "eot", "eom", "padding")}
    if values.get("add_bos_token") and named["bos"] is not None:
        bos = tokens[named["bos"]]
        begins = [(bos, named["bos"])]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos}:0 $A:0", special_tokens=begins)
    texts = {name: tokens[i] for name, i in named.items() if i is not None}
    loaded = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token=texts.get("bos"),
        eos_token=texts.get("eos"),
        pad_token=texts.get("padding"),
        clean_up_tokenization_spaces=False,
    )
    ends = {i for name in ("eos", "eot", "eom") if (i := named[name]) is not None}
    ends |= {i for i, type_ in enumerate(types) if type_ == _CONTROL and tokens[i] in _END_NAMES}
    return loaded, frozenset(ends)
