"""Tokenizers, incremental decoding and stop strings."""

from worker_service.text.reply import ReplyText
from worker_service.text.tokenizer import ByteTokenizer, Tokenizer

__all__ = ["ByteTokenizer", "ReplyText", "Tokenizer"]
