"""Which of several instances has the least work pending: for routers, and for the simulator. No I/O.

Work is counted in tokens of prompt. A prompt that is still to be computed delays the first token of a new request by its
length. A request that decodes takes its share of every step: more with every token of its context, which each step reads.
A length stage whose instances would make a request wait much longer than those of the next one passes it on (`stage_for`).
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

REQUEST_TOKENS = 256
"""Of work: a request, in addition to its prompt and its context (ADR 51)."""
CONTEXT_SHARE = 0.1
"""Of work: a token of a request's length so far, prompt and output (ADR 51)."""
KNOWN_SHARE = 0.5
"""Of a prompt: what an instance that has computed its beginning need not compute again, at least (`PrefixAffinity`)."""
SPILL_S = 0.5
"""A stage passes a request on if the expected wait for its prompt is longer by this much than in the next stage."""


class Sent(NamedTuple):
    """Requests sent to an instance that its last record cannot include. tokens: of their prompts."""

    requests: int
    tokens: int


NOTHING_SENT = Sent(0, 0)


def work_tokens(prompt_tokens: int, requests: int, context_tokens: int) -> float:
    """The pending work of an instance.

    prompt_tokens: still to be computed. requests: running and queued. context_tokens: of these, prompt and output so far.
    """
    return prompt_tokens + REQUEST_TOKENS * requests + CONTEXT_SHARE * context_tokens


def sent_tokens(sent: Sent) -> float:
    """The work of requests that are on their way to an instance."""
    return work_tokens(sent.tokens, sent.requests, sent.tokens)


def saved_tokens(tokens: int) -> float:
    """What an instance saves that has computed the beginning of a prompt of this many tokens: one request's work at least."""
    return max(float(REQUEST_TOKENS), KNOWN_SHARE * tokens)


def wait_s(prompt_tokens: float, prompt_tokens_per_s: float) -> float:
    """Seconds until the pending prompts of an instance are computed; 0 where its throughput is not known."""
    return prompt_tokens / prompt_tokens_per_s if prompt_tokens_per_s > 0 else 0.0


def delay_s(answer_tokens: float, prompt_tokens: float, work: float, prompt_tokens_per_s: float) -> float:
    """Seconds by which an instance's pending work delays an answer of so many tokens; 0 where its throughput is not known.

    prompt_tokens: of prompts still to be computed, which delay an answer once. work: theirs and that of the requests, as
    `work_tokens` says; a request delays others with each of their tokens, so all of its work delays one of REQUEST_TOKENS.
    """
    return wait_s(prompt_tokens + (work - prompt_tokens) * answer_tokens / REQUEST_TOKENS, prompt_tokens_per_s)


def stage_for(waits_s: Seq[float]) -> int:
    """The index of the stage that takes a request.

    waits_s: the shortest wait in each of the stages that cover its length, the earliest first, as `wait_s` says. The request
    goes to the next stage as long as it waits there less by more than `SPILL_S`.
    """
    stage = 0
    while stage + 1 < len(waits_s) and waits_s[stage] - waits_s[stage + 1] > SPILL_S:
        stage += 1
    return stage
