"""An upper bound on the characters per token of a tokenizer. No I/O.

A prompt with more characters than its context allows can be refused without being tokenized.
"""

from collections.abc import Iterator, Mapping
from typing import Any

MOST_COMPOSED = 4
"""Most characters that NFC composes into one: the longest canonical decomposition (U+1F82)."""

_KEEPS_LENGTH = {"Prepend", "NFD", "NFKD", "Lowercase", "ByteLevel"}
_KEEPS_TEXT = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"}


def characters_per_token(tokenizer: Mapping[str, Any]) -> int | None:
    """Largest number of characters that one token can represent, from the content of tokenizer.json.

    None if there is no such bound, because text may be removed or shortened before tokenization, or a token may represent any
    number of unknown characters.
    """
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    if model.get("type", "BPE") not in ("BPE", "Unigram") or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    vocab = model["vocab"]
    pieces = list(vocab) if isinstance(vocab, Mapping) else [piece for piece, _ in vocab]
    splitters = list(parts(tokenizer.get("pre_tokenizer"), "pretokenizers"))
    if not _knows_every_byte(pieces, splitters, byte_fallback=bool(model.get("byte_fallback"))):
        return None
    if not all(map(_keeps_text, splitters)):
        return None
    shrinks = 1
    for normalizer in parts(tokenizer.get("normalizer"), "normalizers"):
        if normalizer["type"] in ("NFC", "NFKC"):
            shrinks = MOST_COMPOSED
        elif normalizer["type"] not in _KEEPS_LENGTH and not _replaces_by_no_less(normalizer):
            return None
    return shrinks * max(len(piece) for piece in [*pieces, *(token["content"] for token in added)])


def parts(part: Mapping[str, Any] | None, inner: str) -> Iterator[Mapping[str, Any]]:
    """A normalizer, pre-tokenizer or decoder, or the elements of a sequence of them. inner: the name of that list."""
    if part and part["type"] == "Sequence":
        for each in part[inner]:
            yield from parts(each, inner)
    elif part:
        yield part


def _knows_every_byte(pieces: list[str], splitters: list[Mapping[str, Any]], *, byte_fallback: bool) -> bool:
    """Whether every character has tokens, because 256 pieces represent single bytes."""
    if byte_fallback:
        return {f"<0x{byte:02X}>" for byte in range(256)} <= set(pieces)
    return any(splitter["type"] == "ByteLevel" for splitter in splitters) and set(byte_alphabet()) <= set(pieces)


def _keeps_text(splitter: Mapping[str, Any]) -> bool:
    if splitter["type"] in ("Split", "Punctuation"):
        return bool(splitter["behavior"] != "Removed")
    return splitter["type"] in _KEEPS_TEXT


def _replaces_by_no_less(normalizer: Mapping[str, Any]) -> bool:
    pattern = normalizer.get("pattern") or {}
    return "String" in pattern and len(normalizer["content"]) >= len(pattern["String"])


def byte_alphabet() -> dict[str, int]:
    """The table of byte-level BPE (GPT-2), which represents each byte by a printable character: character -> byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
