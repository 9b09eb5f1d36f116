"""Grammars in the engines: replies are of their form, wherever they run; hostile grammars hurt only themselves."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from penstock.services.domain.errors import (
    InvalidRequest,
    PenstockError,
    RequestFailed,
    Unavailable,
    UnsupportedByModel,
)
from penstock.services.domain.latency import StepLatencyModel
from penstock.services.tool_calls.formats import HERMES
from penstock.services.tool_calls.parser import parse_reply
from penstock.types.prompts import ChatMessage, ChatPrompt, Prompt, TextPrompt
from penstock.types.replies import FinishReason, TokenFrame
from penstock.types.requests import Draft, GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.structured import StructuredOutput
from penstock.types.tools import Tool, ToolChoice, ToolMode, ToolUse
from penstock.types.workers import EngineFinished
from penstock.worker_service.engine.loop import LoopEngine
from penstock.worker_service.engine.simulated.engine import SimulatedEngineOptions, simulated_engine
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_engine
from penstock.worker_service.grammar import trials
from penstock.worker_service.grammar.compiler import MAX_COMPILED, GrammarCompiler
from penstock.worker_service.grammar.source import GrammarSource, reply_grammar
from penstock.worker_service.grammar.token_grammar import TokenGrammar, Vocabulary, compiled
from penstock.worker_service.text.tokenizer import ByteTokenizer
from tests.support.engines import move, started
from tests.support.malformed_forms import HOSTILE
from tests.support.present import present

FAMILY = Path(__file__).parents[2] / "models" / "family"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON_FORM = StructuredOutput(json_schema=json.dumps(SCHEMA))
HELLO = ChatPrompt((ChatMessage("user", "hello"),))


@pytest.fixture(scope="module", params=["torch", "simulated"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[LoopEngine]:
    async with _engine(request.param) as started:
        yield started


@pytest.fixture(scope="module")
async def other(engine: LoopEngine) -> AsyncIterator[LoopEngine]:
    """A second engine of the same model."""
    async with _engine(engine.info.engine) as started:
        yield started


def _engine(kind: str, folder: Path = FAMILY / "small") -> AbstractAsyncContextManager[LoopEngine]:
    if kind == "torch":
        return started(torch_engine(TorchEngineOptions(folder, "tiny", kv_tokens=8192)))
    latency = StepLatencyModel.linear(1e-4, 1e-6, 0.0)
    return started(simulated_engine(SimulatedEngineOptions("sim", latency, reply_tokens=12)))


@pytest.fixture(scope="module")
async def simulated() -> AsyncIterator[LoopEngine]:
    async with _engine("simulated") as started:
        yield started


@pytest.fixture
async def compiler(simulated: LoopEngine) -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(simulated.tokenizer)
    yield compiler
    await compiler.close()


async def _compiled(compiler: GrammarCompiler, form: StructuredOutput, salt: str = "") -> TokenGrammar | None:
    sampling = SamplingParams(structured_output=form)
    return await compiler.compile(GenerationRequest("c", TextPrompt("x"), sampling, cache_salt=salt), ())


async def _reply(
    engine: LoopEngine,
    form: StructuredOutput | None,
    *,
    prompt: Prompt = HELLO,
    seed: int | None = None,
    most: int = 400,
    resumed: Sequence[int] = (),
    name: str = "r",
) -> tuple[str, list[int], FinishReason]:
    """(text, tokens, reason) of a reply: sampled with a seed, else greedy."""
    sampling = SamplingParams(1.0 if seed is not None else 0.0, 1.0, seed, most, structured_output=form)
    text, tokens, reason = "", list[int](), FinishReason.ABORTED
    async for event in engine.generate(GenerationRequest(name, prompt, sampling, tuple(resumed))):
        if isinstance(event, TokenFrame):
            text += event.text
            tokens += event.token_ids
        elif isinstance(event, EngineFinished):
            reason = event.reason
    return text, tokens, reason


async def test_every_reply_fits_its_schema(engine: LoopEngine) -> None:
    """Greedy, and by eight seeds at once in one batch."""
    replies = await asyncio.gather(
        _reply(engine, JSON_FORM), *(_reply(engine, JSON_FORM, seed=seed, name=f"r{seed}") for seed in range(8))
    )
    for text, _, reason in replies:
        value = json.loads(text)
        assert reason is FinishReason.STOP
        assert set(value) == {"name", "age", "tags"}
        assert len(value["name"]) <= 8
        assert 0 <= value["age"] <= 120
        assert set(value["tags"]) <= {"a", "b"}
    assert len({text for text, _, _ in replies}) > 1 or engine.info.engine == "simulated"  # which draws nothing


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (StructuredOutput(regex=r"[0-9]{2}/[a-c]\."), r"[0-9]{2}/[a-c]\."),
        (StructuredOutput(choice=("yes", 'n"o\n')), 'yes|n"o\n'),
        (StructuredOutput(grammar='start: "x" /[0-9]{3}/ "y"'), "x[0-9]{3}y"),
        (StructuredOutput(grammar='root ::= "u" d d\nd ::= [0-9]'), "u[0-9]{2}"),
    ],
)
async def test_every_reply_is_of_its_form(engine: LoopEngine, form: StructuredOutput, pattern: str) -> None:
    for seed in (None, 1, 2):
        text, _, reason = await _reply(engine, form, seed=seed)
        assert re.fullmatch(pattern, text)
        assert reason is FinishReason.STOP


async def test_a_grammar_that_allows_the_free_reply_leaves_it_as_it_is(engine: LoopEngine) -> None:
    anything = StructuredOutput(regex=r"(.|\n)*")
    for prompt in (HELLO, ChatPrompt((ChatMessage("user", "What is 12 + 30?"),))):
        for seed in (None, 5):
            free = await _reply(engine, None, prompt=prompt, seed=seed, most=40)
            assert await _reply(engine, anything, prompt=prompt, seed=seed, most=40) == free


async def test_a_reply_with_a_form_leaves_its_neighbours_as_they_are(engine: LoopEngine) -> None:
    free = [await _reply(engine, None, seed=seed, most=30) for seed in range(3)]
    together = await asyncio.gather(
        *(_reply(engine, None, seed=seed, most=30, name=f"f{seed}") for seed in range(3)),
        *(_reply(engine, JSON_FORM, seed=seed, name=f"j{seed}") for seed in range(3)),
    )
    assert list(together[:3]) == free


async def test_a_reply_goes_on_elsewhere_with_its_form(engine: LoopEngine, other: LoopEngine) -> None:
    """Failover and resumption: behind any of its tokens the other engine writes the rest, token by token the same."""
    text, tokens, reason = await _reply(engine, JSON_FORM, seed=3)
    for at in (1, len(tokens) // 2, len(tokens) - 2):
        rest, more, ended = await _reply(other, JSON_FORM, seed=3, resumed=tokens[:at])
        assert tokens[:at] + more == tokens
        assert text.endswith(rest)
        assert ended is reason


async def test_a_reply_moves_with_its_form(engine: LoopEngine, other: LoopEngine) -> None:
    """Its KV goes along; its place in the grammar is found anew from its tokens."""
    form = StructuredOutput(regex="([a-f][0-9]){60}")
    _, whole, _ = await _reply(engine, form, seed=4)
    sampling = SamplingParams(1.0, 1.0, 4, 400, structured_output=form)
    request, seen = GenerationRequest("moves", HELLO, sampling), list[int]()
    events = engine.generate(request)
    async for event in events:
        seen += event.token_ids if isinstance(event, TokenFrame) else ()
        if len(seen) >= 5:
            break
    stopped, _, last = await move(engine, other, "moves", "t")
    await engine.leave("moves")
    await events.aclose()
    moved = [*stopped.tokens[len(stopped.tokens) - stopped.output_tokens :]]
    async for event in other.enter("t", request, stopped.tokens, last):
        if isinstance(event, TokenFrame):
            moved += event.token_ids
    assert moved == whole


async def test_tokens_that_break_the_form_cannot_be_resumed(engine: LoopEngine) -> None:
    with pytest.raises(InvalidRequest, match="resume_token_ids"):
        await _reply(engine, JSON_FORM, resumed=engine.tokenizer.encode_text("no object"))


@pytest.mark.parametrize("wrong", [False, True], ids=["the reply", "another text"])
async def test_a_reply_with_a_form_is_the_same_with_a_draft(engine: LoopEngine, wrong: bool) -> None:
    """Masks follow the proposed tokens: right ones stand, and those that break the form are never taken."""
    text, tokens, reason = await _reply(engine, JSON_FORM, seed=6)
    before = engine.speculation().counts["given"]
    draft = Draft(text=text[: len(text) // 2] + "] not JSON any more {" + text[len(text) // 2 :] if wrong else text)
    sampling = SamplingParams(1.0, 1.0, 6, 400, structured_output=JSON_FORM)
    request, found, ended = GenerationRequest("drafted", HELLO, sampling, draft=draft), list[int](), None
    async for event in engine.generate(request):
        if isinstance(event, TokenFrame):
            found += event.token_ids
        if isinstance(event, EngineFinished):
            ended = event
    assert found == tokens
    assert present(ended).reason is reason
    after = engine.speculation().counts["given"]
    accepted = after.accepted - before.accepted
    assert accepted > 0
    assert (accepted < after.verified - before.verified) == wrong


TOOLS = (
    Tool("add", "Adds.", json.dumps({"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
                                     "required": ["a"], "additionalProperties": False})),
    Tool("stop", "", json.dumps({"type": "object", "properties": {}, "additionalProperties": False}), strict=True),
)  # fmt: skip


@pytest.mark.parametrize("parallel", [True, False])
async def test_a_required_call_is_one(parallel: bool) -> None:
    async with _engine("simulated") as engine:
        for text in ("a", "b", "c", "d"):
            use = ToolUse(TOOLS, ToolChoice(ToolMode.REQUIRED, parallel=parallel))
            said, _, _ = await _reply(engine, None, prompt=ChatPrompt((ChatMessage("user", text),), use), seed=1)
            reply = parse_reply(said, HERMES, "r")
            assert reply.calls
            assert parallel or len(reply.calls) == 1
            assert not reply.content
            assert {call.name for call in reply.calls} <= {"add", "stop"}


async def test_a_trained_model_with_a_template_for_tools_is_made_to_call_them(tmp_path: Path) -> None:
    """The shipped weights know no tools; given a template with tools, the grammar makes valid calls of what they write."""
    from models.training.tokenizer import CHAT_TEMPLATE

    folder = tmp_path / "tools"
    shutil.copytree(FAMILY / "small", folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("<|tool|>", "<|user|>"))
    use = ToolUse(TOOLS, ToolChoice(ToolMode.REQUIRED, "add", parallel=False))
    prompt = ChatPrompt((ChatMessage("user", "What is 1 + 2?"),), use)
    async with _engine("torch", folder) as engine:
        assert engine.tokenizer.tool_format is HERMES
        for seed in (None, 1, 2):
            said, _, _ = await _reply(engine, None, prompt=prompt, seed=seed)
            (call,) = parse_reply(said, HERMES, "r").calls
            assert call.name == "add"
            assert json.loads(call.arguments)["a"] <= 99


async def test_a_model_without_a_template_for_tools_takes_none(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(FAMILY / "small", folder)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    async with _engine("torch", folder) as engine:
        assert engine.tokenizer.tool_format is None
        with pytest.raises(UnsupportedByModel, match="takes no tools"):
            await _reply(engine, None, prompt=ChatPrompt(HELLO.messages, ToolUse(TOOLS)))
        unasked = ChatPrompt(HELLO.messages, ToolUse(TOOLS, ToolChoice(ToolMode.NONE)))
        assert await _reply(engine, None, prompt=unasked, most=5) == await _reply(engine, None, most=5)


_HOSTILE = {name: form(0) for name, form in HOSTILE.items()} | {
    "special tokens": StructuredOutput(grammar="start: <|end|> <[0-9]>"),
}


@pytest.mark.parametrize("name", [name for name in _HOSTILE if name != "multiple of a prime"])  # HANGING
async def test_a_hostile_grammar_costs_little_and_hurts_only_its_own_request(simulated: LoopEngine, name: str) -> None:
    """It is refused by its field, or ends its own reply. Meanwhile another reply comes out whole."""
    alone = await _reply(simulated, JSON_FORM)
    hostile = asyncio.create_task(_reply(simulated, _HOSTILE[name], name="hostile", most=300))
    assert await _reply(simulated, JSON_FORM) == alone
    await asyncio.wait([hostile])
    if (error := hostile.exception()) is not None:
        assert isinstance(error, (InvalidRequest, RequestFailed))
        assert isinstance(error, RequestFailed) or f"structured_output.{_HOSTILE[name].kind}" in str(error)
    assert (await _reply(simulated, None, name="hostile"))[0], "its id is free again"


@pytest.mark.parametrize(
    "text",
    [
        'start: x\nx: y y | y x y | "a"\ny: x | "a" | y y y\n',
        pytest.param('start: s\ns: s s | "a"\n', marks=pytest.mark.slow),
    ],
)
def test_a_grammar_whose_steps_take_longer_and_longer_ends(text: str) -> None:
    """In the middle of a reply, and where one is resumed. A wide schema does not."""
    vocabulary = Vocabulary.of(ByteTokenizer())
    source = reply_grammar(_request(StructuredOutput(grammar=text)), None)
    grammar = compiled(source, vocabulary)
    reply = grammar.begun(())
    with pytest.raises(RequestFailed, match="structured output"):
        _written(reply, b"a" * 3_000)
    with pytest.raises(RequestFailed, match="structured output"):
        grammar.begun([ord("a")] * 3_000)


def test_a_wide_schema_does_not_take_too_long() -> None:
    properties = {f"property_{i}": {"type": ["string", "integer", "null"]} for i in range(300)}
    form = StructuredOutput(json_schema=json.dumps({"type": "object", "properties": properties}))
    reply = compiled(reply_grammar(_request(form), None), Vocabulary.of(ByteTokenizer())).begun(())
    _written(reply, json.dumps(dict.fromkeys(properties, 1), separators=(",", ":")).encode())


def _written(reply: TokenGrammar, text: bytes) -> None:
    for token in text:
        reply.allowed()
        reply.take(token)


def _request(form: StructuredOutput) -> GenerationRequest:
    return GenerationRequest("r", TextPrompt("x"), SamplingParams(structured_output=form))


async def test_the_event_loop_turns_while_a_grammar_is_compiled(simulated: LoopEngine) -> None:
    """The compiler works on a thread of its own and leaves the interpreter to others."""
    slow = {"anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20)}, "title": str(j)}
                      for j in range(40)]}  # fmt: skip
    form = StructuredOutput(json_schema=json.dumps(slow))
    task = asyncio.create_task(_reply(simulated, form, most=1))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 20
    if error := task.exception():
        assert isinstance(error, PenstockError)


async def test_a_grammar_is_compiled_once(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request with the same schema does not wait for it again, and the longest unused are forgotten."""
    properties = {f"field{i}": {"type": "integer"} for i in range(200)}
    form = StructuredOutput(json_schema=json.dumps({"type": "object", "properties": properties}))
    made = list[str]()

    def counted(source: GrammarSource, vocabulary: Vocabulary) -> TokenGrammar:
        made.append(source.text)
        return compiled(source, vocabulary)

    monkeypatch.setattr("penstock.worker_service.grammar.token_grammar.compiled", counted)
    for _ in range(3):
        assert await _compiled(compiler, form) is not None
    assert len(made) == 1
    for i in range(MAX_COMPILED + 3):
        await _compiled(compiler, StructuredOutput(regex=f"a{i}"))
    assert len(compiler._compiled) == MAX_COMPILED


HANGING = _HOSTILE["multiple of a prime"]
"""Keeps llguidance 1.9 busy for over two minutes."""


async def test_a_grammar_without_end_is_refused_by_name_and_holds_nobody_up(compiler: GrammarCompiler) -> None:
    """Others are compiled meanwhile; the same one is refused at once the next time, and so is one that takes all memory."""
    hanging = asyncio.create_task(_compiled(compiler, HANGING, "attacker"))
    for i in range(3):
        assert await _compiled(compiler, StructuredOutput(regex=f"a{i}"), "other") is not None
    assert not hanging.done(), "others waited for it"
    with pytest.raises(InvalidRequest, match=r"sampling\.structured_output\.json_schema.*more than 1 s"):
        await hanging
    with pytest.raises(InvalidRequest, match="more than 1 s"):
        await _compiled(compiler, HANGING, "another")
    assert await _compiled(compiler, StructuredOutput(json_schema='{"type": "integer"}'), "attacker") is not None


async def test_who_is_refused_in_a_loop_is_refused_slowly(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a grammar was tried, is no grammar, or was refused before. Others are served meanwhile."""
    monkeypatch.setattr(trials, "REFUSED_REST_S", 3600.0)
    with pytest.raises(InvalidRequest):
        await _compiled(compiler, _HOSTILE["unknown keyword"], "attacker")
    again = [
        asyncio.create_task(_compiled(compiler, _HOSTILE[name], "attacker"))
        for name in ("unknown keyword", "chain of rules", "deep")
    ]
    assert await _compiled(compiler, StructuredOutput(regex="[a-c]"), "other") is not None
    with pytest.raises(InvalidRequest):
        await _compiled(compiler, _HOSTILE["chain of rules"], "another")
    assert not any(waits.done() for waits in again)
    for waits in again:
        waits.cancel()


async def test_trials_go_on_after_their_process_was_killed(compiler: GrammarCompiler) -> None:
    assert await _compiled(compiler, StructuredOutput(json_schema='{"type": "boolean"}')) is not None
    tried = compiler._trials
    hanging = asyncio.create_task(_compiled(compiler, HANGING))
    while not tried._waiting:
        await asyncio.sleep(0)
    present(tried._process).kill()
    with pytest.raises(Unavailable):
        await hanging
    await present(tried._reading)  # nobody reads now, though the exit status may not be known yet
    assert await _compiled(compiler, StructuredOutput(json_schema='{"type": "string"}')) is not None


async def test_a_trial_whose_process_ends_at_its_start_is_told_so(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(Unavailable):
        await _compiled(compiler, StructuredOutput(json_schema="{}"))
