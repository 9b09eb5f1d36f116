"""What LiteLLM gets from the API at argv[1], as JSON. Run by the Python that has LiteLLM."""

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no call elsewhere

import litellm

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": "double", "description": "Doubles.", "parameters": PARAMETERS}}]


def main(url: str) -> dict[str, Any]:
    def ask(model: str, messages: list[Any], **options: Any) -> Any:
        return litellm.completion(
            model=f"openai/{model}", api_base=url, api_key="unused", messages=messages, temperature=0, **options
        )

    messages: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
    turns = []
    for _ in range(3):
        reply = ask("cascade", messages, max_tokens=12)
        turns.append(reply.choices[0].message.content)
        messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "And 3 + 4?"}]
    stream = ask("cascade", messages[:1], max_tokens=12, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    conversation: list[Any] = [{"role": "user", "content": "Double 4."}]
    arguments = []
    for _ in range(2):
        message = ask("large", conversation, tools=TOOLS, tool_choice="required").choices[0].message
        conversation.append(message)
        for call in message.tool_calls:
            arguments.append(json.loads(call.function.arguments))
            conversation.append({"role": "tool", "tool_call_id": call.id, "content": "8"})
    final = ask("large", conversation, tools=TOOLS, tool_choice="none").choices[0].message.content
    try:
        ask("cascade", messages[:1], max_tokens=10**9 * 10)
        refused = ""
    except litellm.BadRequestError as error:
        refused = str(error)
    return {"turns": turns, "streamed": streamed, "arguments": arguments, "final": final, "refused": refused}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1]), default=str))
