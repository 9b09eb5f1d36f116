"""What the models are trained on: right, held out by content and by wording, and within the context."""

import ast
import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.training import (
    arithmetic,
    data,
    drafts,
    learning,
    problems,
    tasks,
    tokenizer,
    train,
    wording,
)  # fmt: skip
from models.training.first import train as first_edition
from models.training.problems import Problem, is_correct
from models.training.rows import BOS, IGNORED

CONTEXT = 2048
ROOM_FOR_A_CHAT = 600  # tokens that even the longest problem leaves for what came before it


def some(count: int, seed: int = 1) -> list[Problem]:
    return list(islice(tasks.stream(seed), count))


def every_kind(per_kind: int = 6) -> Iterator[Problem]:
    for task, level in tasks.KINDS:
        for i in range(per_kind):
            yield tasks.make(task, level, str(i))


def test_the_same_seed_gives_the_same_problems() -> None:
    assert some(300) == some(300)
    assert some(50) != some(50, seed=2)
    first = tasks.held_out(80, 5)
    tasks._held_out.cache_clear()
    assert tasks.held_out(80, 5) == first


def test_right_replies_are_right_and_others_are_wrong() -> None:
    for problem in every_kind():
        assert is_correct(problem.answer, problem.reply), problem
        assert not is_correct(problem.answer, ""), problem
        assert not is_correct(problem.answer, problem.reply[:-1]), problem
        assert not is_correct(problem.answer, problem.reply + "x"), problem


def _value(expression: str) -> int:
    """An arithmetic expression's value, by Python's own parser."""
    assert re.fullmatch(r"[\d+*/()\-]+", expression)
    return int(eval(compile(ast.parse(expression, mode="eval"), "expression", "eval"), {"__builtins__": {}}))


@pytest.mark.parametrize("task", ["add", "subtract", "multiply"])
def test_arithmetic_agrees_with_python(task: str) -> None:
    """Asked from the prompt alone: the numbers and signs that stand in it."""
    for level in tasks.LEVELS:
        for seed in range(40):
            problem = tasks.make(task, level, str(seed), noise=wording.clean)
            numbers = [int(n) for n in re.findall(r"\d+", problem.prompt)]
            match task:
                case "add":
                    assert int(problem.answer) == sum(numbers)
                case "subtract":
                    assert int(problem.answer) == abs(numbers[0] - numbers[1])
                case _:
                    assert int(problem.answer) == numbers[0] * numbers[1]


def test_twins_are_held_out_together() -> None:
    """Sums with their operands swapped, and a list in another order, are the same problem."""
    say = wording.Phrasing(random.Random(1))
    for a, b in ((12, 30), (7, 95), (331, 48)):
        assert drafts.sorted_text((a, b)) == drafts.sorted_text((b, a))
    keys = {problem.key: problem for problem in some(4000)}
    for problem in keys.values():
        if problem.task in ("sort", "sum", "extreme", "keep", "alphabetize", "initials", "reorder", "add", "multiply"):
            values = problem.key.split(" ", 1)[1].split(",")
            assert values == sorted(values)
    assert arithmetic.add(random.Random(3), 2, say).keys[0].startswith("add ")


def test_nothing_held_out_is_trained_on() -> None:
    """Neither a problem's content, nor a text of its prompt, nor a wording; a chat counts with all its turns."""
    test = tasks.held_out(500, 2027)
    assert len({problem.key for problem in test}) == 500
    assert all(problem.held_out for problem in test)
    keys = {key for problem in test for key in problem.keys if problems.is_held_out(key)}
    prompts = {
        problem.prompt
        for problem in test
        if problem.task not in ("follow_numbers", "follow_list", "follow_word", "tools")
    }
    for problem in islice(tasks.stream(7), 4_000):
        assert not keys & {*problem.keys}
        assert not problem.held_out
        assert problem.prompt not in prompts
        assert not tasks.has_held_out_wording(problem), problem.wordings


def test_everything_fits_the_context() -> None:
    for problem in every_kind(20):
        prompt, reply = data.turn_ids(problem)
        assert 1 + len(prompt) + len(reply) <= CONTEXT - ROOM_FOR_A_CHAT, problem
        assert len(reply) <= 512, problem


def test_the_chat_template_writes_what_is_trained_on() -> None:
    """Token ids of training and those of a request through the tokenizer's template are the same, tool calls included."""
    built = tokenizer.build()
    with_tools = 0
    for problem in every_kind(2):
        ids, _ = data.chat_ids(data.with_reply(problem))
        messages = [{"role": m.role, "content": m.content} for m in data.with_reply(problem)]
        assert built(built.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"] == ids
        prompt, _ = data.turn_ids(problem)
        asked = built.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        assert built(asked, add_special_tokens=False)["input_ids"] == [BOS, *prompt]
        if problem.task == "tools":
            with_tools += 1
            system, _, listed = messages[0]["content"].removesuffix("\n</tools>").partition("<tools>\n")
            offered = [json.loads(line) for line in listed.splitlines()]
            bare = [{"role": "system", "content": system.rstrip("\n")}] * bool(system) + [
                _as_openai(message) for message in messages[1:-1]
            ]
            assert built.apply_chat_template(bare, tools=offered, tokenize=False, add_generation_prompt=True) == asked
    assert with_tools


def _as_openai(message: dict[str, str]) -> dict[str, object]:
    """A message with its tool call as OpenAI's API holds it."""
    begin, end = problems.TOOL_CALL
    if not message["content"].startswith(begin):
        return dict(message)
    call = json.loads(message["content"].removeprefix(begin).removesuffix(end))
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]}


def test_tool_calls_name_a_tool_that_is_offered_and_solve_the_problem() -> None:
    for level in tasks.LEVELS:
        for seed in range(40):
            problem = tasks.make("tools", level, str(seed))
            offered = problem.messages[0].content
            for message in (*problem.messages, problems.Message("assistant", problem.reply)):
                if message.role == "assistant" and message.content.startswith("<tool_call>"):
                    call = json.loads(message.content.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
                    assert f'"name": "{call["name"]}"' in offered
                    assert set(call) == {"name", "arguments"}
                    if call["name"] == "calculator":
                        assert _value(call["arguments"]["expression"]) >= 0
            if problem.messages[-1].role == "tool" and not problem.reply.startswith("<"):
                assert problem.reply == problem.messages[-1].content


def test_tool_calls_are_compared_by_value() -> None:
    call = problems.tool_call("lookup", key="pens")
    assert is_correct(call, '<tool_call>{"arguments":{"key":"pens"},"name":"lookup"}</tool_call>')
    assert not is_correct(call, problems.tool_call("lookup", key="pears"))
    assert not is_correct(call, json.dumps({"name": "lookup", "arguments": {"key": "pens"}}))
    assert is_correct('{"a": 1, "b": "x"}', '{"b":"x", "a":1}')
    assert not is_correct('{"a": 1}', '{"a": 1')
    assert not is_correct('{"a": 1}', "[1]")


def test_only_replies_are_learnt_from() -> None:
    for problem in every_kind(1):
        ids, labels = data.chat_ids(data.with_reply(problem))
        learnt = [i for i, mark in zip(ids, labels, strict=True) if mark != IGNORED]
        said = [m.content for m in data.with_reply(problem) if m.role == "assistant"]
        assert bytes(tokenizer.build().decode(learnt, skip_special_tokens=True), "utf-8") == "".join(said).encode()


@pytest.mark.slow
def test_training_learns_and_is_taken_up_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was broken off goes on at its checkpoint, and the loss falls."""
    shape = {"vocab_size": 264, "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    seed = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, **shape))
    seed.save_pretrained(str(tmp_path / "seed"))
    recipe = train.Recipe(32, 2, 2, 2, 48, "seed", 60_000, 10_000, 30_000, 0.02, 4e-3, 5, True)
    monkeypatch.setitem(train.RECIPES, "tiny", recipe)
    monkeypatch.setattr(train, "TOKENS_PER_BATCH", 1024)
    monkeypatch.setattr(train, "LOG_STEPS", 5)
    monkeypatch.setattr(train, "WARMUP_STEPS", 5)
    monkeypatch.setattr(train, "PROBE_PER_KIND", 0)
    monkeypatch.setattr(train.Run, "measure", lambda self: self.exact.update(add=0.25))
    first = train.Run("tiny", tmp_path, 1)
    first.go(until_tokens=30_000)
    again = train.Run("tiny", tmp_path, 1)
    assert (again.step, again.seen) == (first.step, first.seen)
    for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    figures = train.train("tiny", tmp_path, 1)
    assert figures["training_tokens"] >= 60_000  # type: ignore[operator]
    losses = [json.loads(line)["loss"] for line in (tmp_path / "tiny.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.5
    assert (tmp_path / "tiny" / "model.safetensors").exists()
    assert train.weights({"add": 0.25})["add"] == pytest.approx(0.5 + 1.5 * 0.75)


def test_every_recipe_can_grow_and_the_family_fits_its_budget() -> None:
    """Head size and key/value heads are the seed's, nothing shrinks; tiers and judge are under 40 MB in bfloat16."""
    parameters = {}
    for name, recipe in train.RECIPES.items():
        grown = learning.config(recipe)
        edition, _, seed = recipe.grows_from.rpartition("/")
        first = learning.config(first_edition.RECIPES[seed] if edition else train.RECIPES[seed])
        assert (grown.head_dim, grown.num_key_value_heads) == (first.head_dim, first.num_key_value_heads)
        for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            assert getattr(grown, field) >= getattr(first, field), (name, field)
        with torch.device("meta"):
            parameters[name] = sum(p.numel() for p in LlamaForCausalLM(grown).parameters())
    judge = parameters["medium"]
    assert 2 * (parameters["small"] + parameters["medium"] + parameters["large"] + judge) <= 40e6
