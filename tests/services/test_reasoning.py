"""Reasoning: how templates mark it, and its separation from the answer, however the text is cut."""

import random
import shutil
from pathlib import Path

import pytest

from penstock.services.domain.errors import UnsupportedByModel
from penstock.services.reasoning import REASONING_FORMATS, ReasoningParser, reasoning_parser
from penstock.types.prompts import ChatMessage, ChatPrompt, TextPrompt
from penstock.types.sampling import SamplingParams
from penstock.types.structured import StructuredOutput
from penstock.types.tools import Tool, ToolChoice, ToolMode, ToolUse
from penstock.worker_service.text.hf import HfTokenizer
from tests.conftest import FAMILY

THINK = REASONING_FORMATS["think"]
HELLO = (ChatMessage("user", "hello"),)
HYBRID = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"  # Qwen 3
ALWAYS = "<think>\n{# ended by </think> #}"  # DeepSeek R1, Qwen 3 Thinking
ON_REQUEST = "{% if thinking is defined and thinking %}<think>{% else %}</think>{% endif %}"  # DeepSeek V3.1


def parsed(text: str, *, opened: bool, cuts: random.Random | None = None) -> tuple[str, str]:
    parser = ReasoningParser(THINK, opened=opened)
    pieces, at = list[tuple[str, str]](), 0
    while at < len(text):
        size = len(text) if cuts is None else cuts.randint(1, 4)
        pieces.append(parser.push(text[at : at + size]))
        at += size
    pieces.append(parser.finish())
    return "".join(piece[0] for piece in pieces), "".join(piece[1] for piece in pieces)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "answer"),
    [
        ("<think>\nab c\n</think>\n\nYes. ", False, "ab c", "Yes. "),
        ("\n <think>a</think>b", False, "a", "b"),
        ("ab c\n\n d</think>\n\nYes", True, "ab c\n\n d", "Yes"),
        ("no marks at all", False, "", "no marks at all"),
        (" a < b <thin", False, "", " a < b <thin"),
        ("never ends </thi", True, "never ends </thi", ""),
        ("<think></think>x", False, "", "x"),
        ("a</think>b<think>c</think>d", True, "a", "b<think>c</think>d"),
        ("<thi", False, "", "<thi"),
        ("", True, "", ""),
    ],
)
def test_parts_do_not_depend_on_the_cuts(text: str, opened: bool, reasoning: str, answer: str) -> None:
    assert parsed(text, opened=opened) == (reasoning, answer)
    for seed in range(20):
        assert parsed(text, opened=opened, cuts=random.Random(seed)) == (reasoning, answer)


def test_text_is_handed_out_as_soon_as_it_is_certain() -> None:
    parser = ReasoningParser(THINK, opened=True)
    assert parser.push("so far") == ("so far", "")
    assert parser.push(" good </") == (" good", "")
    assert parser.push("b") == (" </b", "")
    assert parser.push("</think>") == ("", "")
    assert parser.push("\nx") == ("", "x")
    assert parser.push("y ") == ("", "y ")


def tokenizer(folder: Path, beginning: str) -> HfTokenizer:
    """The shipped tokenizer with a template that writes `beginning` before a reply."""
    shutil.copytree(FAMILY / "small", folder, dirs_exist_ok=True)
    template = (folder / "chat_template.jinja").read_text() + beginning
    (folder / "chat_template.jinja").write_text(template)
    return HfTokenizer(folder)


@pytest.mark.parametrize(
    ("beginning", "name"),
    [("", None), (HYBRID, "think"), (ALWAYS, "think_opened"), (ON_REQUEST, "think_opened_on_request")],
)
def test_the_format_is_what_the_template_renders(tmp_path: Path, beginning: str, name: str | None) -> None:
    form = tokenizer(tmp_path, beginning).reasoning_format
    assert (form.name if form is not None else None) == name


def test_the_switch_reaches_the_template(tmp_path: Path) -> None:
    hybrid = tokenizer(tmp_path, HYBRID)

    def text(thinking: bool | None, effort: str = "") -> str:
        return hybrid.decode(hybrid.encode(ChatPrompt(HELLO, thinking=thinking, reasoning_effort=effort)))

    assert text(True) == text(None)
    assert text(False) == text(None, "none") == text(None) + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("beginning", "prompt", "field"),
    [
        ("", ChatPrompt(HELLO, thinking=True), "thinking"),
        ("", ChatPrompt(HELLO, reasoning_effort="low"), "reasoning_effort"),
        (HYBRID, ChatPrompt(HELLO, reasoning_effort="low"), "reasoning_effort"),
        (ALWAYS, ChatPrompt(HELLO, thinking=False), "thinking"),
        (ALWAYS, ChatPrompt(HELLO, reasoning_effort="none"), "reasoning_effort"),
    ],
)
def test_what_a_template_cannot_do_is_refused_by_name(
    tmp_path: Path, beginning: str, prompt: ChatPrompt, field: str
) -> None:
    """Another tier's may, so the error is one that the cascade passes over."""
    with pytest.raises(UnsupportedByModel, match=rf"prompt\.chat\.{field}: this model's chat template"):
        tokenizer(tmp_path, beginning).encode(prompt)


def test_a_model_that_never_or_always_reasons_may_be_told_so(tmp_path: Path) -> None:
    assert tokenizer(tmp_path / "never", "").encode(ChatPrompt(HELLO, thinking=False))
    assert tokenizer(tmp_path / "always", ALWAYS).encode(ChatPrompt(HELLO, thinking=True))


def test_the_effort_reaches_a_template_with_levels(tmp_path: Path) -> None:
    levels = tokenizer(tmp_path, "{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}")
    ids = levels.encode(ChatPrompt(HELLO, reasoning_effort="high"))
    assert levels.decode(ids).endswith("(high)")


def test_replies_with_an_enforced_form_have_no_reasoning() -> None:
    """The form holds from the first token, so that a reply of a model that reasons is the answer alone."""
    chat, free = ChatPrompt(HELLO), SamplingParams()
    form = SamplingParams(structured_output=StructuredOutput(json_object=True))
    required = ToolUse((Tool("f"),), ToolChoice(ToolMode.REQUIRED))
    assert reasoning_parser("think_opened", chat, free) is not None
    assert reasoning_parser("think_opened", chat, form) is None
    assert reasoning_parser("think_opened", ChatPrompt(HELLO, required), free) is None
    assert reasoning_parser("think_opened", TextPrompt("x"), free) is None
    assert reasoning_parser("", chat, free) is None
    assert reasoning_parser("of a later version", chat, free) is None
