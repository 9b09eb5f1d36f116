"""Which instance has lately computed the beginning of a prompt: its prefix cache may still hold it. No I/O."""

from collections import OrderedDict
from collections.abc import Iterator

from services.domain.requests import ChatPrompt, Prompt, TextPrompt

MOST_PREFIXES = 20_000  # remembered; the longest unused is forgotten first
BLOCK = 256  # characters, or token ids, of a prompt that is no chat
WORTH = 0.5  # share of a prompt from which on its beginning counts


class Familiar:
    """Remembers where prompts went, by every prefix of whole messages or blocks."""

    def __init__(self, most: int = MOST_PREFIXES) -> None:
        self._most = most
        self._where: OrderedDict[tuple[str, int], str] = OrderedDict()

    def learn(self, tier: str, prompt: Prompt, instance_id: str) -> None:
        """This instance has computed the prompt."""
        for key, _ in _prefixes(prompt):
            self._where[tier, key] = instance_id
            self._where.move_to_end((tier, key))
        while len(self._where) > self._most:
            self._where.popitem(last=False)

    def where(self, tier: str, prompt: Prompt) -> str:
        """The instance that knows the longest part, at least half of it; empty if there is none."""
        found = ""
        for key, share in _prefixes(prompt):
            instance_id = self._where.get((tier, key))
            if instance_id is None:
                break
            found = instance_id if share >= WORTH else found
        return found


def _prefixes(prompt: Prompt) -> Iterator[tuple[int, float]]:
    """(hash, share of the prompt) of every prefix, shortest first."""
    match prompt:
        case ChatPrompt(messages):
            parts = [f"{m.role}\0{m.content}".encode() for m in messages]
        case TextPrompt(text):
            parts = [text[i : i + BLOCK].encode("utf-8", "replace") for i in range(0, len(text), BLOCK)]
        case _:
            ids = prompt.token_ids
            parts = [repr(ids[i : i + BLOCK]).encode() for i in range(0, len(ids), BLOCK)]
    whole, known, key = sum(map(len, parts)), 0, 0
    for part in parts:
        key = hash((key, part))
        known += len(part)
        yield key, known / max(1, whole)
