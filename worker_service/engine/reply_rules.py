"""Rules for the length and the end of a reply, common to all engines. No I/O."""

from collections.abc import Iterable, Sequence

from penstock.services.domain.errors import PromptTooLong, invalid, unsupported
from penstock.types.replies import FinishReason, PositionLogprobs, TokenLogprob
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.worker_service.text.reply import ReplyText
from penstock.worker_service.text.tokenizer import Tokenizer


def reply_room(request: GenerationRequest, prompt: Sequence[int], context_tokens: int, tokenizer: Tokenizer) -> int:
    """The largest number of output tokens of a reply to `prompt`, including resumed ones.

    Raises:
        PromptTooLong: The prompt leaves no room for a reply.
        InvalidRequest: The prompt is empty, a token is unknown to the model, or there are too many resumed tokens.
        UnsupportedByModel: A token of the sampling parameters is unknown to the model; another tier's may know it.
    """
    if not prompt:
        raise invalid("prompt", "holds no tokens")
    if len(prompt) >= context_tokens:
        raise PromptTooLong.by("prompt", len(prompt), context_tokens)
    if max(prompt) >= tokenizer.vocab_size:  # a tokenizer may have more tokens than its model
        raise invalid("prompt", f"token {max(prompt)} of it is unknown to the model, which has {tokenizer.vocab_size}")
    resumed = request.resume_token_ids
    if resumed and max(resumed) >= tokenizer.vocab_size:
        raise invalid("resume_token_ids", f"this model's token ids end at {tokenizer.vocab_size - 1}")
    for field in ("logit_bias", "stop_token_ids"):
        if (token := max(getattr(request.sampling, field), default=-1)) >= tokenizer.vocab_size:
            problem = f"token {token} is unknown to the model, whose token ids end at {tokenizer.vocab_size - 1}"
            raise unsupported(f"sampling.{field}", problem)
    room = context_tokens - len(prompt)
    requested = request.sampling.max_tokens
    limit = min(room, requested) if requested is not None else room
    if len(resumed) > limit:
        raise invalid("resume_token_ids", f"{len(resumed)} tokens, but the reply may have {limit}")
    return limit


def resumed_text(request: GenerationRequest, tokenizer: Tokenizer) -> ReplyText:
    """The text of the reply after the resumed tokens."""
    text = ReplyText(tokenizer, request.sampling.stop, request.sampling.stop_token_ids)
    for token in request.resume_token_ids:
        text.push(token)
    return text


def end_reason(
    text: ReplyText, token: int, output: int, limit: int, sampling: SamplingParams, tokenizer: Tokenizer
) -> FinishReason | None:
    """Why a reply with `output` tokens, of which `token` is the last, is complete; None if it continues."""
    if text.stopped or (token in tokenizer.eos_ids and not sampling.ignore_eos):
        return FinishReason.STOP
    return FinishReason.LENGTH if output >= limit else None


def logprobs(tokenizer: Tokenizer, token: int, value: float, top: Iterable[tuple[int, float]]) -> PositionLogprobs:
    """What is told of a position. top: (token, logprob) of the most likely ones."""

    def one(token_id: int, value: float) -> TokenLogprob:
        return TokenLogprob(token_id, value, tokenizer.token_bytes(token_id))

    return PositionLogprobs(one(token, value), tuple(one(*each) for each in top))
