"""The second edition's tokenizer: the first one's, a special token for tools' messages, and a chat template with tools."""

from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from models.training import tokenizer as first

ROLES = ("system", "user", "assistant", "tool")
TOOL = "<|tool|>"

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
    fast = first.build()
    fast.add_tokens([AddedToken(TOOL, normalized=False, special=True)], special_tokens=True)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save(folder: Path) -> None:
    build().save_pretrained(str(folder))
