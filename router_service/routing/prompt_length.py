"""Estimates the number of tokens of a prompt before a worker has counted them. No I/O.

Workers tokenize (docs/adr/0001), so the router learns each tier's tokens per character from what they admit.
"""

from penstock.types.prompts import Prompt, TokenPrompt

FIRST_TOKENS_PER_CHARACTER = 0.25  # until a tier has admitted its first prompt; usual for English text
SMOOTHING = 0.1


class PromptLengths:
    """One estimate per tier."""

    def __init__(self) -> None:
        self._per_character: dict[str, float] = {}

    def estimate(self, tier: str, prompt: Prompt) -> int:
        """Tokens; exact for a prompt of token ids."""
        if isinstance(prompt, TokenPrompt):
            return len(prompt.token_ids)
        return round(prompt.characters * self._per_character.get(tier, FIRST_TOKENS_PER_CHARACTER))

    def learn(self, tier: str, prompt: Prompt, tokens: int) -> None:
        """A worker of the tier has counted the tokens."""
        if isinstance(prompt, TokenPrompt) or not (characters := prompt.characters):
            return
        ratio, known = tokens / characters, self._per_character.get(tier)
        self._per_character[tier] = ratio if known is None else known + SMOOTHING * (ratio - known)
