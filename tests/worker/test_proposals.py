"""Proposed tokens change how many steps a reply takes, and nothing else."""

import re
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.types.replies import FinishReason, TokenFrame
from penstock.types.sampling import SamplingParams
from penstock.types.structured import StructuredOutput
from penstock.types.workers import EngineFinished
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.interface import LastBlocks
from penstock.worker_service.engine.simulated.engine import SimulatedRunner
from penstock.worker_service.grammar.source import reply_grammar
from penstock.worker_service.grammar.token_grammar import Vocabulary, compiled
from penstock.worker_service.text.tokenizer import ByteTokenizer
from tests.support.draft_sources import KnownReply
from tests.worker.test_core_laws import (
    ENDLESS,
    PROMPT,
    before_each_pass,
    engine,
    nothing_held,
    request,
    run,
    text_of,
    tokens_of,
)

REPLY = 20


def expected_outputs(sampling: SamplingParams = ENDLESS, prompt: Seq[int] = PROMPT) -> list[Any]:
    """The outputs of a reply without proposals."""
    core = engine()
    core.add(request(sampling=sampling), list(prompt))
    return run(core)["a"]


def drafted(
    core: EngineCore,
    reply: Seq[int],
    name: str = "a",
    prompt: Seq[int] = PROMPT,
    sampling: SamplingParams = ENDLESS,
    **source: Any,
) -> KnownReply:
    """Add a request with a source that knows its reply."""
    known = KnownReply(len(prompt), reply, **source)
    core.proposals.attach(name, known)
    core.add(request(name, sampling), list(prompt))
    return known


def logprobs_of(outputs: Seq[Any]) -> list[Any]:
    return [entry for output in outputs if isinstance(output, TokenFrame) for entry in output.logprobs]


def check_state(core: EngineCore) -> None:
    """Between two steps: nothing unverified counts as computed, no block is surplus, and the prefix tree holds the KV of its
    keys. The simulated engine's KV of a token is the token."""
    pool, runner = core.scheduler.pool, core.runner
    assert isinstance(runner, SimulatedRunner)
    for sequence in core.scheduler.running:
        assert sequence.computed < len(sequence.tokens) <= sequence.prompt_tokens + sequence.max_output_tokens
        assert len(sequence.blocks) == -(-sequence.computed // pool.block_tokens)
        kv = [int(runner._kv[block, i]) for block in sequence.blocks for i in range(pool.block_tokens)]
        assert kv[: sequence.computed] == sequence.tokens[: sequence.computed]
    for (_, tokens), (block, _) in pool._tree.items():
        assert tuple(runner._kv[block]) == tokens


def test_right_proposals_save_steps() -> None:
    """A step yields the proposed tokens and the one behind them; the last token of a reply is never proposed."""
    expected = expected_outputs()
    core = engine()
    source = drafted(core, tokens_of(expected), most=4)
    outputs = run(core)["a"]
    assert tokens_of(outputs) == tokens_of(expected)
    assert text_of(outputs) == text_of(expected)
    assert core.steps == REPLY / 5
    assert all(limit == REPLY - place - 1 for place, limit in source.limits)
    assert [token for tokens in source.observed for token in tokens] == tokens_of(expected)[
        :-5
    ]  # not the step that ends the reply
    counts = core.proposals.of_sources
    assert (counts.verified, counts.accepted, counts.failures) == (16, 16, 0)


@settings(max_examples=60, deadline=None)
@given(
    wrong_share=st.sampled_from((0.0, 0.2, 0.5, 1.0)),
    most=st.integers(1, 12),
    block_tokens=st.integers(1, 9),
    blocks=st.integers(9, 40),
    budget=st.integers(2, 64),
    seed=st.integers(0, 1000),
    requests=st.integers(1, 5),
)
def test_any_proposals_leave_replies_blocks_and_the_prefix_tree_as_they_are(
    wrong_share: float, most: int, block_tokens: int, blocks: int, budget: int, seed: int, requests: int
) -> None:
    """Right, wrong or mixed; in small budgets and pools; with and without preemption."""
    prompts = [[*PROMPT[: 5 + i], 65 + i] for i in range(requests)]
    expected = [expected_outputs(prompt=prompt) for prompt in prompts]
    kv_tokens = max(blocks * block_tokens, 48)
    core = engine(kv_tokens=kv_tokens, kv_block_tokens=block_tokens, max_step_tokens=budget, max_queued=8)
    for i, prompt in enumerate(prompts):
        drafted(core, tokens_of(expected[i]), f"r{i}", prompt, wrong_share=wrong_share, most=most, seed=seed + i)
    outputs = run(core, 2000, look=check_state)
    for i, reply in enumerate(expected):
        own = outputs[f"r{i}"]
        assert (tokens_of(own), text_of(own)) == (tokens_of(reply), text_of(reply))
        assert own[-1].usage.output_tokens == REPLY
    assert core.scheduler.pool.free == core.scheduler.pool.count
    assert not core.proposals._sources


@pytest.mark.parametrize("wrong_share", [0.0, 0.3, 1.0])
def test_proposals_leave_a_reply_with_a_form_as_it_is(wrong_share: float) -> None:
    """It is of its form, whether proposed tokens are right, and whether they fit the form."""
    form = "([a-m]{3}-){4}[n-z]{3}"
    sampling = SamplingParams(temperature=0.0, max_tokens=40, structured_output=StructuredOutput(regex=form))
    grammar = compiled(reply_grammar(request(sampling=sampling), None), Vocabulary.of(ByteTokenizer()))
    plain = engine()
    plain.add(request(sampling=sampling), PROMPT, grammar.begun(()))
    expected = run(plain)["a"]
    assert re.fullmatch(form, text_of(expected))
    core = engine()
    core.proposals.attach("a", KnownReply(len(PROMPT), tokens_of(expected), wrong_share=wrong_share, most=5))
    core.add(request(sampling=sampling), PROMPT, grammar.begun(()))
    outputs = run(core)["a"]
    assert (tokens_of(outputs), text_of(outputs)) == (tokens_of(expected), text_of(expected))
    assert core.steps < plain.steps or wrong_share == 1.0
    assert nothing_held(core)


def test_every_standing_token_has_its_logprobs() -> None:
    sampling = replace(ENDLESS, top_logprobs=2)
    expected = expected_outputs(sampling)
    core = engine()
    drafted(core, tokens_of(expected), sampling=sampling, wrong_share=0.3, most=5)
    outputs = run(core)["a"]
    assert logprobs_of(outputs) == logprobs_of(expected)
    assert len(logprobs_of(outputs)) == REPLY
    assert core.steps < REPLY


@pytest.mark.parametrize("at", [3, 6, 11])
def test_a_reply_ends_at_its_stop_string_within_a_proposal(at: int) -> None:
    """Usage counts the tokens up to it; what stood behind it is neither emitted nor counted."""
    whole = expected_outputs()
    sampling = replace(ENDLESS, stop=(text_of(whole)[at : at + 2],))
    expected = expected_outputs(sampling)
    core = engine()
    drafted(core, tokens_of(whole), sampling=sampling, most=9)
    outputs = run(core)["a"]
    assert (tokens_of(outputs), text_of(outputs)) == (tokens_of(expected), text_of(expected))
    assert isinstance(outputs[-1], EngineFinished)
    assert (outputs[-1].reason, outputs[-1].usage.output_tokens) == (
        FinishReason.STOP,
        expected[-1].usage.output_tokens,
    )
    assert nothing_held(core)


def test_an_end_token_is_drawn_not_proposed() -> None:
    """A proposal is cut before it; the reply ends with the same token."""
    sampling = replace(ENDLESS, ignore_eos=False, max_tokens=90)
    expected = expected_outputs(sampling)
    assert expected[-1].reason is FinishReason.STOP
    tokens = tokens_of(expected)
    core = engine()
    drafted(core, [*tokens, 65, 66, 67], sampling=sampling)
    outputs = run(core)["a"]
    assert tokens_of(outputs) == tokens
    assert (outputs[-1].reason, outputs[-1].usage.output_tokens) == (FinishReason.STOP, len(tokens))
    assert outputs[-1].usage.accepted_draft_tokens == len(tokens) - 1
    assert core.proposals.of_sources.verified == len(tokens) - 1


@pytest.mark.parametrize("garbage", [[-1, 5], [10**9], [65] * 500, []])
def test_garbage_costs_nothing_but_its_pass(garbage: list[int]) -> None:
    class Garbage(KnownReply):
        def propose(self, tokens: Seq[int], limit: int) -> list[int]:
            return garbage

    expected = expected_outputs()
    core = engine()
    core.proposals.attach("a", Garbage(len(PROMPT), ()))
    core.add(request(), PROMPT)
    outputs = run(core)["a"]
    assert tokens_of(outputs) == tokens_of(expected)
    assert core.proposals.of_sources.failures == 0
    assert nothing_held(core)


@pytest.mark.parametrize("method", ["propose", "observe"])
def test_a_source_that_raises_is_dropped_and_counted(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> Any:
        raise RuntimeError("a fault in the source")

    expected = expected_outputs()
    core = engine()
    source = drafted(core, tokens_of(expected), most=3)
    other = drafted(core, tokens_of(expected), "b", most=4)
    monkeypatch.setattr(source, method, raises)
    outputs = run(core)
    assert tokens_of(outputs["a"]) == tokens_of(outputs["b"]) == tokens_of(expected)
    assert core.proposals.of_sources.failures == 1
    assert len(other.observed) == 3  # the other source goes on
    assert nothing_held(core)


def test_a_pass_that_fails_for_proposed_tokens_is_run_without_them() -> None:
    """The request and its neighbour continue; the source is dropped and counted."""
    expected = expected_outputs()
    core = engine()

    def broken(rows: Any) -> None:
        if any(row.tokens[-1] == 200 for row in rows):
            raise RuntimeError("this row cannot be computed")

    before_each_pass(core, broken)
    drafted(core, [*tokens_of(expected)[:6], 200, *tokens_of(expected)[7:]], most=3)
    drafted(core, tokens_of(expected), "b", most=3)
    outputs = run(core)
    assert tokens_of(outputs["a"]) == tokens_of(outputs["b"]) == tokens_of(expected)
    assert core.proposals.of_sources.failures == 1
    assert nothing_held(core)


def test_proposals_take_only_free_blocks_and_the_budget_that_is_left() -> None:
    """They shrink in place of a preemption, and a step never computes more tokens than its budget."""
    expected = expected_outputs()
    core = engine(kv_tokens=104, kv_block_tokens=8, max_step_tokens=9)  # two replies of 47 tokens just fit
    sizes = list[int]()
    before_each_pass(core, lambda rows: sizes.append(sum(len(row.tokens) for row in rows)))
    for name in "ab":
        drafted(core, tokens_of(expected), name)
    outputs = run(core)
    assert tokens_of(outputs["a"]) == tokens_of(outputs["b"]) == tokens_of(expected)
    assert core.scheduler.preemptions == 0
    assert max(sizes) == 9
    assert core.steps < 20


def test_a_reply_moves_in_the_middle_of_a_draft() -> None:
    """What moves is what stands; the target continues with or without a source."""
    expected = tokens_of(expected_outputs())
    source, target = engine(), engine()
    drafted(source, expected, most=4)
    before = source.step()
    stopped = source.transfers.pause("a", 0)
    assert len(stopped.tokens) == len(PROMPT) + 5
    target.transfers.reserve("t", source.runner.kv_layout, PROMPT)
    target.enter(request(), PROMPT, "t", list(stopped.tokens), LastBlocks(0, stopped.data))
    target.proposals.attach("a", KnownReply(len(PROMPT), expected, most=3))
    source.leave("a")
    after = run(target)["a"]
    assert tokens_of([output for _, output in before]) + tokens_of(after) == expected
    assert nothing_held(source)
    assert nothing_held(target)
    assert not source.proposals._sources
