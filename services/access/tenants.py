"""Tenants: who a key belongs to, and what they may ask for. No I/O."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.domain.errors import FieldProblem, InvalidRequest, PermissionDenied
from services.domain.requests import ChatPrompt, Prompt, SamplingParams, TextPrompt

CHARS_PER_TOKEN = 4
"""An estimate, for the tokens of a prompt that is not tokenized yet."""
RESERVED_OUTPUT_TOKENS = 256
"""Reserved for a reply whose request sets no max_tokens; what it really has is counted at its end."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """The limits of a tenant; None and an empty `models`: no limit.

    requests_per_minute, tokens_per_minute: over all routers, in any 60 s; tokens of prompts and replies.
    concurrency: requests at once, over all routers. models: names that requests may use.
    max_tokens: largest max_tokens of a request, and its default. max_n: choices of one request, prompts times n.
    max_priority: highest priority. slo: whether requests may ask for latencies. slo_classes: the named classes that they may
        ask for, and then no latencies of their own. sample_prompts: whether a share of its prompts may be stored.
        ignore_eos: whether they may ask for replies that continue after the end-of-sequence token. own_cache: whether its
        requests share the KV of prompts that begin alike with no other tenant's.
    """

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    models: tuple[str, ...] = ()
    max_tokens: int | None = None
    max_n: int | None = None
    max_priority: int | None = None
    slo: bool = True
    ignore_eos: bool = False
    slo_classes: tuple[str, ...] = ()
    sample_prompts: bool = False
    own_cache: bool = False

    def allows_model(self, model: str) -> bool:
        return not self.models or model in self.models

    def cache_salt(self, salt: str) -> str:
        """What the salt of a request is to workers, so that no tenant can give that of another one's cache."""
        return f"{self.name if self.own_cache else ''}/{salt}" if self.own_cache or salt else ""

    def check(
        self, model: str, sampling: SamplingParams, choices: int, priority: int, *, slo_class: str | None
    ) -> None:
        """Check what a request asks for.

        slo_class: the name of its SLO class; empty for latencies of its own, None for no SLO.

        Raises:
            PermissionDenied: The model is not for this tenant.
            InvalidRequest: A field is above the tenant's limit; the error names every one.
        """
        if not self.allows_model(model):
            raise PermissionDenied(f"model: tenant '{self.name}' may not use it")
        max_tokens = sampling.max_output_tokens
        problems = [
            FieldProblem(name, f"at most {limit} for tenant '{self.name}', not {value}")
            for name, value, limit in (
                ("sampling.max_output_tokens", max_tokens, self.max_tokens),
                ("n", choices, self.max_n),
                ("priority", priority, self.max_priority),
            )
            if value is not None and limit is not None and value > limit
        ]
        if slo_class is not None and not self.slo:
            problems.append(FieldProblem("slo", f"not for tenant '{self.name}'"))
        elif slo_class is not None and self.slo_classes and slo_class not in self.slo_classes:
            allowed = ", ".join(self.slo_classes)
            problems.append(FieldProblem("slo.name", f"must be one of the classes of tenant '{self.name}': {allowed}"))
        if sampling.ignore_eos and not self.ignore_eos:
            problems.append(FieldProblem("sampling.ignore_eos", f"not for tenant '{self.name}'"))
        if problems:
            raise InvalidRequest(*problems)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request: a tenant, by one of its keys."""

    tenant: Tenant
    key_id: str


def estimated_tokens(prompt: Prompt) -> int:
    """Tokens of a prompt that is not tokenized yet."""
    if isinstance(prompt, ChatPrompt):
        return math.ceil(prompt.characters / CHARS_PER_TOKEN)
    if isinstance(prompt, TextPrompt):
        return math.ceil(len(prompt.text) / CHARS_PER_TOKEN)
    return len(prompt.token_ids)


def reserved_tokens(prompt: Prompt, sampling: SamplingParams) -> int:
    """Tokens to reserve for one request until its reply has ended and their number is known."""
    return estimated_tokens(prompt) + (sampling.max_output_tokens or RESERVED_OUTPUT_TOKENS)


WINDOW_S = 60
"""Limits per minute hold in any 60 s, not only from minute to minute."""


@dataclass(slots=True)
class UsageWindow:
    """What was used in each of the last seconds. One process counts with it alone while Redis is unavailable."""

    used: dict[int, int] = field(default_factory=dict)

    def add(self, now_s: float, amount: int) -> None:
        second = math.floor(now_s)
        if second in self.used:
            self.used[second] += amount
            return
        self.used[second] = amount
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
