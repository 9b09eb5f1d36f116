"""The family's tokenizer: every byte is a token, plus seven special tokens; any text at all can be written with it.

Bytes and not words, because the tasks are about digits and letters, and because three models of so few parameters
have none to spare for a large vocabulary.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROLES = ("system", "user", "assistant", "tool")
SPECIAL = ("<|bos|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
TOOL = "<|tool|>"
VOCAB_SIZE = 264  # 256 bytes, 7 special tokens, a spare one: a multiple of 8

# Tools stand in the system message, one JSON object a line; a call is written as Hermes and Qwen models write it.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ '<|system|>' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n' }}{% endif %}"
    "{{ '<tools>' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '\\n</tools><|end|>' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}{% endif %}"
    "{% if not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% for call in message.get('tool_calls') or [] %}"
    "{% set function = call.function if call.function is defined else call %}"
    '{{ \'<tool_call>\\n{"name": "\' + function.name + \'", "arguments": \' }}'
    "{{ function.arguments if function.arguments is string else function.arguments | tojson }}"
    "{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build() -> PreTrainedTokenizerFast:
    """The tokenizer, made from nothing: no training data is involved."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    fast.add_tokens([AddedToken(TOOL, normalized=False, special=True)], special_tokens=True)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save(folder: Path) -> None:
    build().save_pretrained(str(folder))
