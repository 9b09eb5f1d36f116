"""`penstock ask` and `penstock chat`: send prompts from the terminal."""

from typing import Annotated

import typer

from penstock.cli import forms, options, targets
from penstock.cli.output import console, fail, print_json, print_line, seconds
from penstock.client.sync import Client
from penstock.client.types import Options, Tokens
from penstock.types.events import Escalated, Finished, InstanceChanged, Judged, TierAdmitted, TierDeclined, TierStarted
from penstock.types.replies import FinishReason
from penstock.types.slo import Slo

ModelOption = Annotated[str, typer.Option(help="cascade, or a tier's name.")]
TemperatureOption = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
MaxTokensOption = Annotated[int | None, options.tokens("Largest length of the reply, in tokens.")]


def ask(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    model: ModelOption = "cascade",
    temperature: TemperatureOption = 0.0,
    max_tokens: MaxTokensOption = None,
    seed: Annotated[int | None, options.seed("Seed of sampling; default: drawn by the router.")] = None,
    tools: forms.ToolsOption = None,
    tool_choice: forms.ToolChoiceOption = None,
    json_object: forms.JsonObjectOption = False,
    json_schema: forms.JsonSchemaOption = None,
    regex: forms.RegexOption = None,
    grammar: forms.GrammarOption = None,
    choice: forms.ChoiceOption = None,
    ttft: Annotated[float | None, options.duration("Ask for the first token within this time: 2s, 500ms.")] = None,
    tpot: Annotated[float | None, options.duration("Ask for at most this time per output token: 50ms.")] = None,
    slo: Annotated[str, typer.Option(help="A class of the mesh file, instead of --ttft and --tpot.")] = "",
    decline: Annotated[
        bool, typer.Option("--decline", help="Decline the request if no worker can keep this, instead of best effort.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the answer.")] = False,
    target: targets.Target = None,
    json: targets.Json = False,
) -> None:
    """Send one prompt and show the answer with the events of the cascade.

    The shipped models can only solve small tasks with numbers, letters and words (see models/family/README.md).
    """
    generation = Options(
        model=model,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        tools=forms.tools(tools, tool_choice),
        tool_choice=tool_choice,
        structured_output=forms.structured_output(json_object, json_schema, regex, grammar, choice),
        slo=_slo(ttft, tpot, slo, decline),
        trace=True,
    )
    with targets.requests(target) as client:
        if json:
            print_json(client.generate(prompt, generation))
            return
        _show(client, [{"role": "user", "content": prompt}], generation, quiet=quiet)


def _slo(ttft_s: float | None, tpot_s: float | None, name: str, decline: bool) -> Slo | None:
    """The SLO that the options ask for; None if they ask for none."""
    if name and (ttft_s is not None or tpot_s is not None):
        fail("--slo: must not be combined with --ttft and --tpot: the class has its own", 2)
    if not name and ttft_s is None and tpot_s is None:
        if decline:
            fail("--decline: needs --ttft, --tpot or --slo", 2)
        return None
    return Slo(ttft_s, name=name, fallback="decline" if decline else None, time_per_output_token_s=tpot_s)


def chat(
    model: ModelOption = "cascade",
    temperature: TemperatureOption = 0.0,
    max_tokens: MaxTokensOption = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    target: targets.Target = None,
) -> None:
    """Chat with the mesh. An empty line or Ctrl-D ends the chat."""
    generation = Options(model=model, temperature=temperature, max_tokens=max_tokens, trace=True)
    messages = [{"role": "system", "content": system}] if system else []
    with targets.requests(target) as client:
        while True:
            try:
                prompt = console.input("[bold]you[/] ")
            except (EOFError, KeyboardInterrupt):
                prompt = ""
            if not prompt.strip():
                return
            messages.append({"role": "user", "content": prompt})
            messages.append({"role": "assistant", "content": _show(client, messages, generation, quiet=False)})


def _show(client: Client, messages: list[dict[str, str]], generation: Options, *, quiet: bool) -> str:
    """Print the events as they arrive. Return the answer."""
    text = ""
    for event in client.stream(messages, generation):
        match event:
            case Tokens():
                text += event.text
                console.out(event.text, end="", highlight=False)
            case Finished():
                console.out("")
                if not quiet:
                    for call in event.tool_calls:
                        console.print(f"  calls {call.name}({call.arguments})", highlight=False, markup=False)
                    if event.reason is FinishReason.DECLINED:
                        print_line("  declined: no worker can keep the latency objectives", style="dim")
                    elif not text.strip():
                        print_line("  (the answer is empty)", style="dim")
                    print_line(_summary(event), style="dim")
            case _ if not quiet and (line := _line(event)):
                print_line(line, style="dim")
    return text


def _line(event: object) -> str:
    match event:
        case TierStarted():
            return f"  {event.tier}: running on {event.instance_id}"
        case TierAdmitted(slo_class=str() as slo_class):
            return f"  {event.tier}: served as {slo_class.replace('_', ' ')} by {event.instance_id}"
        case TierDeclined():
            return f"  {event.tier}: declined by {event.instance_id}: {event.reason}"
        case Judged(score=None):
            return f"  {event.tier}: could not be scored"
        case Judged():
            decision = "flagged" if event.flagged else "accepted" if event.accepted else "not accepted"
            if event.better_tier:
                decision = f"the answer of {event.better_tier} scored more"
            because = f" ({event.reason.replace('_', ' ')})" if event.reason else ""
            scorer = f"{event.scorer} (not calibrated)" if event.uncalibrated else event.scorer
            score = f"scored {event.score:.0f}{because} by {scorer}, threshold {event.threshold:.0f}"
            return f"  {event.tier}: {score}: {decision}"
        case Escalated(predicted_score=float() as predicted):
            return f"  {event.from_tier} -> {event.to_tier}: passed over, predicted score {predicted:.0f}"
        case Escalated():
            return f"  {event.from_tier} -> {event.to_tier}: {event.reason.replace('_', ' ')}"
        case InstanceChanged():
            return f"  {event.tier}: continues on {event.to_instance_id} at token {event.offset}"
        case _:
            return ""


def _summary(finished: Finished) -> str:
    slo = ""
    if finished.slo is not None and finished.slo.slo_class is not None:
        slo = ", latency objectives met" if finished.slo.attained else ", latency objectives missed"
    accepted = finished.usage.accepted_draft_tokens
    drafted = f" ({accepted} from a draft)" if accepted else ""
    return (
        f"  {finished.tier}, {finished.usage.output_tokens} tokens{drafted}, first token {seconds(finished.ttft_s)}, "
        f"total {seconds(finished.total_s)}{slo}" + (f", trace {finished.trace_id}" if finished.trace_id else "")
    )
