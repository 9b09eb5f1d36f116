"""A request that an EngineCore runs: its sequence, its text and what has been counted of it. No I/O."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.types.replies import FinishReason, Usage
from penstock.types.workers import EngineFinished
from penstock.worker_service.engine import reply_rules
from penstock.worker_service.engine.proposals import Continuation, Proposals
from penstock.worker_service.engine.runner import Row, RowResult
from penstock.worker_service.scheduling.sequence import Sequence
from penstock.worker_service.scheduling.steps import Chunk
from penstock.worker_service.speculation import acceptance
from penstock.worker_service.text import ReplyText, Tokenizer

if TYPE_CHECKING:
    from penstock.worker_service.grammar.token_grammar import TokenGrammar


@dataclass(slots=True)
class RunningRequest:
    """The state of a request in addition to its sequence.

    declines: where its SLO cannot be kept it is declined. given, given_accepted: tokens that its own source proposed and that
        were verified, and those of them that are accepted. drafted, drafted_accepted: the same of drafting models.
    compute_s: its share of the time of the steps so far, by tokens.
    """

    sequence: Sequence
    text: ReplyText
    grammar: "TokenGrammar | None" = None
    declines: bool = False
    given: int = 0
    given_accepted: int = 0
    compute_s: float = 0.0
    drafted: int = 0
    drafted_accepted: int = 0

    def row(self, chunk: Chunk) -> Row:
        """What a runner computes for a chunk. RequestFailed where the grammar fails."""
        sequence, allowed = self.sequence, None
        end = chunk.start + chunk.count
        if chunk.logits and self.grammar is not None:
            allowed = self.grammar.allowed_along(chunk.proposed) if chunk.proposed else self.grammar.allowed()[None]
        return Row(
            tokens=[*sequence.tokens[chunk.start : end], *chunk.proposed],
            start=chunk.start,
            blocks=sequence.blocks,
            logits=chunk.logits,
            sampling=sequence.sampling,
            offset=end + len(chunk.proposed) - chunk.logits + 1 - sequence.prompt_tokens,
            allowed=allowed,
            output=[*sequence.tokens[sequence.prompt_tokens : end], *chunk.proposed]
            if sequence.sampling.penalizes
            else (),
            sequence=sequence.request_id,
        )

    def continuation(self, chunk: Chunk, result: RowResult, tokenizer: Tokenizer, proposals: Proposals) -> Continuation:
        """The new tokens of a reply: proposed ones that the model draws as well, its own token after them, no further than
        the reply's end."""
        sequence, text = self.sequence, self.text
        accepted, _ = acceptance.matching(chunk.proposed, result.tokens)
        emitted, reason, count = "", None, 0
        for count, token in enumerate(result.tokens[: accepted + 1], 1):
            if self.grammar is not None:
                self.grammar.take(token)
            emitted += text.push(token)
            output = sequence.output_tokens + count
            reason = reply_rules.end_reason(
                text, token, output, sequence.max_output_tokens, sequence.sampling, tokenizer
            )
            if reason is not None:
                emitted += text.finish()
                break
        if chunk.proposed and proposals.gave(sequence.request_id):
            self.given += len(chunk.proposed)
            self.given_accepted += min(accepted, count)
        elif chunk.proposed and proposals.drafted(sequence.request_id):
            self.drafted += len(chunk.proposed)
            self.drafted_accepted += min(accepted, count)
        tokens = result.tokens[:count]
        pairs = zip(tokens, result.logprobs, strict=False)  # without logprobs, there are none
        logprobs = tuple(
            reply_rules.logprobs(tokenizer, token, raw.chosen, zip(raw.top_ids, raw.top, strict=True))
            for token, raw in pairs
        )
        return Continuation(tokens, min(accepted, count), emitted, logprobs, reason)

    def ended(self, reason: FinishReason) -> EngineFinished:
        sequence = self.sequence
        usage = Usage(
            sequence.prompt_tokens,
            sequence.cached_prompt_tokens,
            sequence.output_tokens,
            self.given_accepted,
            self.given - self.given_accepted,
            self.compute_s,
        )
        stop = self.text.stopped_by
        return EngineFinished(reason, usage, stop, sequence.preemptions, self.drafted, self.drafted_accepted)
