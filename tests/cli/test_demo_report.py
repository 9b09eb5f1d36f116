"""What the demo reports: a sentence that is true also if the cascade saved nothing, in 80 columns."""

import dataclasses
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.cli.demo_report import (
    LIMIT_TIMES,
    PLAIN,
    failover_sentence,
    figures_of,
    savings_sentence,
    show,
)
from penstock.cli.demo_run import Failover, Pace
from penstock.cli.held_out import Question, read_questions
from penstock.cli.replay import Outcome, Run, arrivals_s
from penstock.client.types import Reply
from penstock.question_files.errors import FileError
from penstock.types.events import TierSummary
from penstock.types.replies import FinishReason, Usage

TIERS = ("small", "large")


def outcome(index: int, *, right: bool, tier: str, latency_s: float) -> Outcome:
    question = Question(f"[{index}] How many {'very ' * 20}long prompts are there?", "42", "count", 1)
    usage = Usage(10, 0, 20)
    summary = TierSummary("small", "small", "i", 77.0, 50.0, tier == "small", usage, 0.1)
    text = "Working.\nAnswer: 42" if right else "no"
    reply = Reply(text, (), (), FinishReason.STOP, tier, usage, (summary,), 0.1, latency_s, f"r{index}", "")
    return Outcome(question, latency_s, reply)


def run(count: int, right: int, *, cpu_s: float, tier: str, latency_s: float = 0.5) -> Run:
    outcomes = [outcome(i, right=i < right, tier=tier, latency_s=latency_s) for i in range(count)]
    return Run(outcomes, 10.0, cpu_s)


def figures(cascade: Run, large: Run, limit_s: float = 1.0, others: Mapping[str, Run] | None = None) -> dict[str, Any]:
    small = run(10, 5, cpu_s=0.5, tier="small")
    return figures_of(
        TIERS,
        {"small": small, "large": large, "cascade": cascade, **(others or {})},
        Failover("worker-small-0", 24, 24, 7, 1.5),
        Pace(limit_s / LIMIT_TIMES, 10.0),
        concurrency=16,
        rate_per_s=7.0,
    )


def test_figures_per_answer_and_per_second() -> None:
    """CPU time is per answer; goodput counts answers in time; a failed request is wrong, and neither counted."""
    outcomes = [
        outcome(0, right=True, tier="small", latency_s=0.5),
        outcome(1, right=False, tier="large", latency_s=2.0),
    ]
    failed = Outcome(Question("q", "42"), 3.0, error="UNAVAILABLE")
    result = figures(Run([*outcomes, failed, outcomes[0]], 10.0, 6.0), run(10, 10, cpu_s=4.0, tier="large"))
    cascade = result["cascade"]
    assert cascade["cpu_s_per_answer"] == pytest.approx(2.0)
    assert cascade["goodput_per_s"] == pytest.approx(0.2)
    assert cascade["accuracy"] == pytest.approx(0.5)
    assert cascade["failed"] == 1
    assert [tier["share_answered"] for tier in result["tiers"]] == pytest.approx([2 / 3, 1 / 3])
    assert result["requests"][2]["error"] == "UNAVAILABLE"
    assert json.loads(json.dumps(result)) == result


def test_further_runs_and_what_was_in_vain_are_counted() -> None:
    """Tokens of rejected answers are in vain; those that the next tier accepts as a draft are counted, too."""
    asked = outcome(0, right=True, tier="large", latency_s=0.5)  # by small and large
    assert asked.reply is not None
    after = TierSummary("large", "large", "i", None, None, True, Usage(10, 0, 30, 21, 4), 0.1)
    drafted = dataclasses.replace(asked, reply=dataclasses.replace(asked.reply, tiers=(*asked.reply.tiers, after)))
    alone = outcome(1, right=True, tier="small", latency_s=0.5)
    failed = Outcome(Question("q", "42"), 3.0, error="UNAVAILABLE")
    large = run(10, 5, cpu_s=0.5, tier="large")
    runs = {PLAIN: Run([asked, asked, asked, alone], 10.0, 6.0)}
    result = figures(Run([drafted, alone, failed], 10.0, 6.0), large, others=runs)
    assert (result["cascade"]["tokens_in_vain"], result["cascade"]["drafted_tokens"]) == (20, 21)
    assert {name: each["tokens_in_vain"] for name, each in result["variants"].items()} == {PLAIN: 60}
    assert result["variants"][PLAIN]["cpu_s_per_answer"] == 1.5
    console = Console(file=io.StringIO(), width=80)
    show(result, Path("demo.json"), console)
    assert PLAIN in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("cpu_s", "right", "sentence"),
    [
        (
            4.0,
            9,
            "The cascade saved 60 % of the CPU time that large alone takes, and was right 10.0 points less often.",
        ),
        (4.0, 10, "The cascade saved 60 % of the CPU time that large alone takes, at the same accuracy."),
        (12.0, 10, "The cascade saved no CPU time: it used 1.20 times that of large alone, at the same accuracy."),
        (9.99, 10, "The cascade saved no CPU time: it used 1.00 times that of large alone, at the same accuracy."),
    ],
)
def test_what_was_saved_is_true_also_if_it_is_nothing(cpu_s: float, right: int, sentence: str) -> None:
    result = figures(run(10, right, cpu_s=cpu_s, tier="small"), run(10, 10, cpu_s=10.0, tier="large"))
    assert savings_sentence(result) == result["saved"] == sentence


def test_a_run_without_answers_is_reported() -> None:
    nothing = Run([Outcome(Question("q", "42"), 3.0, error="x")], 10.0, 1.0)
    result = figures(nothing, run(10, 10, cpu_s=10.0, tier="large"))
    assert "unknown" in result["saved"]
    show(result, Path("demo.json"), Console(file=io.StringIO(), width=80))


def test_losses_are_counted() -> None:
    lost = {"worker": "worker-small-0", "requests": 24, "answered": 22, "elsewhere": 3, "longest_s": 2.0}
    assert failover_sentence(lost).endswith("2 were lost.")
    assert failover_sentence(lost | {"answered": 24}).endswith("nothing was lost.")
    assert "No worker was killed" in failover_sentence(lost | {"worker": ""})


def test_the_report_fits_80_columns() -> None:
    """Prompts are cut, not wrapped, and what looks like markup in them is printed."""
    text = io.StringIO()
    result = figures(run(10, 9, cpu_s=4.0, tier="small"), run(10, 10, cpu_s=10.0, tier="large"))
    show(result, Path("demo.json"), Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("[0] How many very" in line for line in lines)
    assert result["saved"] in " ".join(text.getvalue().split())


def test_arrivals_are_the_same_for_the_same_seed() -> None:
    times_s = arrivals_s(2000, 10.0, 1)
    assert times_s == arrivals_s(2000, 10.0, 1) != arrivals_s(2000, 10.0, 2)
    assert times_s[0] == 0
    assert times_s == sorted(times_s)
    assert times_s[-1] == pytest.approx(200, rel=0.1)


def test_objects_and_calls_are_compared_by_value_and_text_by_its_last_answer() -> None:
    assert Question("q", '{"a": 1, "b": 2}').answered_by('{"b":2,"a":1}')
    assert not Question("q", '{"a": 1}').answered_by('{"a": 2}')
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert Question("q", call).answered_by(call.replace(": ", ":"))
    assert not Question("q", call).answered_by('{"name": "add", "arguments": {"a": 1}}')
    assert Question("q", "42").answered_by("40 + 2\nAnswer: 42 ")
    assert not Question("q").answered_by("42")


def test_questions_are_prompts_or_chats(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "2 + 3"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "+ 1"},
    ]
    rows = [{"prompt": "1 + 1", "answer": "2", "task": "add", "level": 1}, {"messages": chat, "answer": "6"}]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    first, second = read_questions(path)
    assert (first.prompt, first.text, first.answer, first.task, first.level) == ("1 + 1", "1 + 1", "2", "add", 1)
    assert (second.prompt, second.text, second.answer) == (chat, "+ 1", "6")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{}", ":1: prompt is missing"),
        ("[]", ":1: must be a JSON object"),
        ("{", ":1: "),
        ('{"messages": []}', ":1: messages: must be a list"),
        ('{"messages": [{"role": "user"}]}', ":1: messages[0]: must be an object with role and content"),
        ("", "no prompts"),
    ],
)
def test_bad_questions_name_the_line_and_the_field(line: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(line)
    with pytest.raises(FileError) as caught:
        read_questions(path)
    assert str(path) in str(caught.value)
    assert problem in str(caught.value)


def test_too_few_questions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(FileError, match="1 prompts, fewer than 2"):
        read_questions(path, 2)
