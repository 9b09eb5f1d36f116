"""Draft sources whose proposals are known beforehand."""

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field


@dataclass
class KnownReply:
    """Proposes the tokens of a reply that is known; `wrong_share` of them are replaced by random ones.

    observed: the new tokens of the reply as they were observed, one list per step. limits: (place in the reply, limit) of
    every request for a proposal.
    """

    prompt_tokens: int
    reply: Seq[int]
    wrong_share: float = 0.0
    most: int = 100
    vocab_size: int = 250
    seed: int = 0
    observed: list[list[int]] = field(default_factory=list)
    limits: list[tuple[int, int]] = field(default_factory=list)
    _proposed: list[int] = field(default_factory=list)

    def propose(self, tokens: Seq[int], limit: int) -> list[int]:
        place = len(tokens) - self.prompt_tokens
        self.limits.append((place, limit))
        rng = random.Random(f"{self.seed}-{place}")
        self._proposed = [
            rng.randrange(self.vocab_size) if rng.random() < self.wrong_share else token
            for token in self.reply[place : place + min(self.most, limit + 1)]
        ]
        return self._proposed

    def observe(self, accepted: int, token: int) -> None:
        self.observed.append([*self._proposed[:accepted], token])
        self._proposed = []
