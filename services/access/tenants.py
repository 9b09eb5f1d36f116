"""Tenants: who a key belongs to, and what they may ask for. No I/O."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.services.mesh_schema.access import MeshTenant
from penstock.types.prompts import Prompt, TokenPrompt
from penstock.types.sampling import SamplingParams

CHARS_PER_TOKEN = 4
"""An estimate, for the tokens of a prompt that is not tokenized yet."""
RESERVED_OUTPUT_TOKENS = 256
"""Reserved for a reply whose request sets no max_tokens; what it really has is counted at its end."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request: a tenant, by one of its keys."""

    tenant: MeshTenant
    key_id: str


def estimated_tokens(prompt: Prompt) -> int:
    """Tokens of a prompt that is not tokenized yet."""
    if isinstance(prompt, TokenPrompt):
        return len(prompt.token_ids)
    return math.ceil(prompt.characters / CHARS_PER_TOKEN)


def reserved_tokens(prompt: Prompt, sampling: SamplingParams) -> int:
    """Tokens to reserve for one request until its reply has ended and their number is known."""
    return estimated_tokens(prompt) + (sampling.max_tokens or RESERVED_OUTPUT_TOKENS)


WINDOW_S = 60
"""Limits per minute hold in any 60 s, not only from minute to minute."""


@dataclass(slots=True)
class UsageWindow:
    """What was used in each of the last seconds. One process counts with it alone while Redis is unavailable."""

    used: dict[int, int] = field(default_factory=dict)

    def add(self, now_s: float, amount: int) -> None:
        second = math.floor(now_s)
        self.used[second] = self.used.get(second, 0) + amount
        for old in [each for each in self.used if each < second - WINDOW_S]:
            del self.used[old]

    def total(self, now_s: float) -> int:
        """What was used in the last 60 s, and in the rest of the second before them: never less than in any 60 s."""
        oldest = math.floor(now_s) - WINDOW_S
        return sum(amount for second, amount in self.used.items() if second >= oldest)

    def free_in_s(self, now_s: float, amount: int, limit: int) -> float:
        """Seconds until `amount` can be used within the limit; 0: now."""
        short, oldest = self.total(now_s) + amount - limit, math.floor(now_s) - WINDOW_S
        if short <= 0:
            return 0.0
        for second in sorted(second for second in self.used if second >= oldest):
            short -= self.used[second]
            if short <= 0:
                return second + WINDOW_S + 1 - now_s
        return float(WINDOW_S)


def rate_limit_headers(states: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """OpenAI's headers. states: (limit, remaining, seconds until nothing is used) by kind, `requests` and `tokens`."""
    headers = {}
    for kind, (limit, remaining, reset_s) in states.items():
        headers[f"x-ratelimit-limit-{kind}"] = f"{limit:.0f}"
        headers[f"x-ratelimit-remaining-{kind}"] = f"{max(0, math.floor(remaining))}"
        headers[f"x-ratelimit-reset-{kind}"] = f"{max(0.0, reset_s):.3f}s"
    return headers
