"""Tokenizers, incremental decoding and stop strings."""

from penstock.worker_service.text.reply import ReplyText
from penstock.worker_service.text.tokenizer import ByteTokenizer, Tokenizer

__all__ = ["ByteTokenizer", "ReplyText", "Tokenizer"]
