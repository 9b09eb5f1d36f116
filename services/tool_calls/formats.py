"""The ways in which families of models write tool calls. No I/O."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way: a JSON object with the function's name and its arguments, between two marks.

    begin, end: around each call; empty where a reply that begins with an object is a call.
    separator: between calls of one reply.
    arguments_key: the key of the arguments.
    """

    name: str
    begin: str
    end: str
    separator: str
    arguments_key: str


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "\n", "arguments")
"""Hermes 2 and 3, Qwen 2.5, Qwen 3, and the shipped family."""
LLAMA3_JSON = ToolFormat("llama3_json", "", "", ";", "parameters")
"""Llama 3.1 to 3.3."""

FORMATS = {one.name: one for one in (HERMES, LLAMA3_JSON)}

_OTHER_CALLS = "<function="  # Qwen 3 Coder: between the same marks, but no JSON


def format_of_template(template: str) -> ToolFormat | None:
    """How a model writes calls, by its chat template; None where it renders no tools, or in a way unknown here."""
    if "tools" not in template or _OTHER_CALLS in template:
        return None
    if HERMES.begin in template:
        return HERMES
    return LLAMA3_JSON if f'"{LLAMA3_JSON.arguments_key}"' in template and '"name"' in template else None
