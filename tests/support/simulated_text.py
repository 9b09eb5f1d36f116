"""The text of a simulated tier's replies as its engine alone computes them, without a mesh or time."""

from collections.abc import Mapping

from penstock.services.domain.latency import StepLatencyModel
from penstock.types.prompts import ChatMessage, ChatPrompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.simulated.engine import SimulatedEngineOptions, simulated_core
from tests.support.virtual_clock import VirtualClock

ENDLESS = 1_000_000
"""`simulated.reply_tokens` of tiers whose replies end by their `max_tokens`."""
MARGIN_TOKENS = 256  # for a prompt and its template


def simulated_texts(tokens: Mapping[str, int], *, reply_tokens: int = ENDLESS) -> dict[str, str]:
    """The greedy reply to each prompt, sent as one chat message. tokens: the `max_tokens` of each prompt, at least one."""
    room = sum(tokens.values()) + MARGIN_TOKENS * len(tokens)
    longest = max(tokens.values()) + MARGIN_TOKENS
    options = SimulatedEngineOptions(
        "sim",
        StepLatencyModel.linear(0.0, 0.0, 0.0),
        reply_tokens,
        kv_tokens=room,
        max_queued=len(tokens),
        max_context_tokens=longest,
    )
    core, _ = simulated_core(options, VirtualClock())
    texts = dict.fromkeys(tokens, "")
    for prompt, most in tokens.items():
        sampling, chat = (
            SamplingParams(temperature=0.0, max_tokens=most),
            ChatPrompt((ChatMessage("user", prompt),)),
        )
        core.add(GenerationRequest(prompt, chat, sampling), core.tokenizer.encode(chat))
    while not core.idle:
        for prompt, output in core.step():
            if isinstance(output, TokenFrame):
                texts[prompt] += output.text
    return texts
