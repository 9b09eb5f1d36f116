"""`penstock ask` and `penstock chat`: prompts from the terminal."""

from typing import Annotated

import typer

from penstock.cli import forms, options, targets
from penstock.cli.output import cli_error_handling, console, print_json, seconds
from penstock.client.sync import Client
from penstock.client.types import Escalated, Finished, InstanceChanged, Judged, Options, TierStarted, Tokens

ModelOption = Annotated[str, typer.Option("--model", help="cascade, or a tier's name.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
MaxTokensOption = Annotated[
    int | None, options.number("--max-tokens", help="Of the reply.", least=1, most=options.MAX_TOKENS)
]


def ask(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    model: ModelOption = "cascade",
    temperature: TemperatureOption = 0.0,
    max_tokens: MaxTokensOption = None,
    seed: Annotated[int | None, options.seed("--seed", help="Of a sampled reply; else the router draws one.")] = None,
    tools: forms.ToolsOption = None,
    tool_choice: forms.ToolChoiceOption = None,
    json_object: forms.JsonObjectOption = False,
    json_schema: forms.JsonSchemaOption = None,
    regex: forms.RegexOption = None,
    grammar: forms.GrammarOption = None,
    choice: forms.ChoiceOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the answer alone.")] = False,
    target: targets.Target = None,
    json: targets.Json = False,
) -> None:
    """Ask one question and see the cascade at work.

    The shipped models know only small tasks with numbers, letters and words (models/family/README.md lists them).
    """
    where = targets.resolve(target)
    wanted = Options(
        model=model,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        tools=forms.tools(tools, tool_choice),
        tool_choice=tool_choice,
        structured_output=forms.structured_output(json_object, json_schema, regex, grammar, choice),
    )
    with cli_error_handling(where), Client(where, retry=targets.INTERACTIVE) as client:
        if json:
            print_json(client.generate(prompt, wanted))
            return
        _show(client, [{"role": "user", "content": prompt}], wanted, quiet=quiet)


def chat(
    model: ModelOption = "cascade",
    temperature: TemperatureOption = 0.0,
    max_tokens: MaxTokensOption = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    target: targets.Target = None,
) -> None:
    """Chat, turn after turn; an empty line or Ctrl-D ends it."""
    where = targets.resolve(target)
    wanted = Options(model=model, temperature=temperature, max_tokens=max_tokens)
    messages = [{"role": "system", "content": system}] if system else []
    with cli_error_handling(where), Client(where, retry=targets.INTERACTIVE) as client:
        while True:
            try:
                said = console.input("[bold]you[/] ")
            except (EOFError, KeyboardInterrupt):
                said = ""
            if not said.strip():
                return
            messages.append({"role": "user", "content": said})
            messages.append({"role": "assistant", "content": _show(client, messages, wanted, quiet=False)})


def _show(client: Client, messages: list[dict[str, str]], wanted: Options, *, quiet: bool) -> str:
    """Print events as they come; return the answer."""
    text = ""
    for event in client.stream(messages, wanted):
        match event:
            case Tokens():
                text += event.text
                console.out(event.text, end="", highlight=False)
            case Finished():
                console.out("")
                if not quiet:
                    for call in event.tool_calls:
                        console.print(f"  calls {call.name}({call.arguments})", highlight=False, markup=False)
                    console.print(_summary(event), style="dim", highlight=False, markup=False)
            case _ if not quiet:
                line = _line(event)
                if line:
                    console.print(line, style="dim", highlight=False, markup=False)
    return text


def _line(event: object) -> str:
    match event:
        case TierStarted():
            return f"  {event.tier}: answers at {event.instance_id}"
        case Judged(score=None):
            return f"  {event.tier}: could not be judged"
        case Judged():
            verdict = "accepted" if event.accepted else "falls short"
            return f"  {event.tier}: scored {event.score:.0f} by {event.scorer}, stands from {event.threshold:.0f}: {verdict}"
        case Escalated():
            return f"  {event.from_tier} -> {event.to_tier}: {event.reason.replace('_', ' ')}"
        case InstanceChanged():
            return f"  {event.tier}: goes on at {event.to_instance_id} from token {event.offset}"
        case _:
            return ""


def _summary(done: Finished) -> str:
    return (
        f"  {done.tier}, {done.usage.output_tokens} tokens, first after {seconds(done.ttft_s)}, "
        f"all in {seconds(done.total_s)}, trace {done.trace_id}"
    )
