"""A request that an EngineCore runs: its sequence, its text and what has been counted of it. No I/O."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.types.replies import FinishReason, Usage
from penstock.types.workers import EngineFinished
from penstock.worker_service.engine import reply_rules
from penstock.worker_service.engine.interface import DraftCounts
from penstock.worker_service.engine.proposals import Continuation, Proposals
from penstock.worker_service.engine.runner import Row, RowResult
from penstock.worker_service.scheduling.sequence import Sequence
from penstock.worker_service.scheduling.steps import Chunk
from penstock.worker_service.speculation import acceptance
from penstock.worker_service.text.reply import ReplyText
from penstock.worker_service.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.worker_service.grammar.token_grammar import TokenGrammar


@dataclass(slots=True)
class RunningRequest:
    """The state of a request in addition to its sequence.

    declines: where its SLO cannot be kept it is declined. given, drafted: what came of the tokens that its own
        source, and that models proposed.
    compute_s: its share of the time of the steps so far, by tokens.
    """

    sequence: Sequence
    text: ReplyText
    grammar: "TokenGrammar | None" = None
    declines: bool = False
    given: DraftCounts = field(default_factory=DraftCounts)
    drafted: DraftCounts = field(default_factory=DraftCounts)
    compute_s: float = 0.0

    def row(self, chunk: Chunk) -> Row:
        """What a runner computes for a chunk. RequestFailed where the grammar fails."""
        sequence, allowed, output = self.sequence, None, list[int]()
        end = chunk.start + chunk.count
        if sequence.sampling.penalizes:
            output = [*sequence.tokens[sequence.prompt_tokens : end], *chunk.proposed]
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
            output=output,
            sequence=sequence.request_id,
        )

    def continuation(self, chunk: Chunk, result: RowResult, tokenizer: Tokenizer, proposals: Proposals) -> Continuation:
        """The new tokens of a reply: proposed ones that the model draws as well, its own token after them, no further than
        the reply's end."""
        sequence, text = self.sequence, self.text
        limit, sampling = sequence.max_output_tokens, sequence.sampling
        matching, _ = acceptance.matching(chunk.proposed, result.tokens)
        emitted, reason, count = "", None, 0
        for count, token in enumerate(result.tokens[: matching + 1], 1):
            if self.grammar is not None:
                self.grammar.take(token)
            emitted += text.push(token)
            reason = reply_rules.end_reason(text, token, sequence.output_tokens + count, limit, sampling, tokenizer)
            if reason is not None:
                emitted += text.finish()
                break
        tokens, accepted = result.tokens[:count], min(matching, count)
        counts = self.drafted if proposals.drafted(sequence.request_id) else self.given
        counts.add(len(chunk.proposed), accepted)
        pairs = zip(tokens, result.logprobs, strict=False)  # without logprobs, there are none
        logprobs = tuple(
            reply_rules.logprobs(tokenizer, token, raw.chosen, zip(raw.top_ids, raw.top, strict=True))
            for token, raw in pairs
        )
        return Continuation(tokens, accepted, emitted, logprobs, reason)

    def ended(self, reason: FinishReason) -> EngineFinished:
        sequence, given, drafted = self.sequence, self.given, self.drafted
        tokens = sequence.prompt_tokens, sequence.cached_prompt_tokens, sequence.output_tokens
        usage = Usage(*tokens, given.accepted, given.verified - given.accepted, self.compute_s)
        stop = self.text.stopped_by
        return EngineFinished(reason, usage, stop, sequence.preemptions, drafted.verified, drafted.accepted)
