"""Which instance has lately computed the beginning of a prompt: its prefix cache may still hold it. No I/O."""

from array import array
from collections import OrderedDict
from collections.abc import Iterator

from services.domain.requests import ChatPrompt, Prompt, TextPrompt

MOST_PREFIXES = 20_000  # remembered; the longest unused is forgotten first
BLOCK = 256  # characters, or token ids, of a prompt that is no chat
MAX_PARTS = 256  # messages or blocks of one prompt that are looked at: what follows costs nothing, however long it is
MAX_CHARACTERS = BLOCK * MAX_PARTS  # of one prompt's text that are looked at
MAX_TOKENS = MAX_CHARACTERS // 4  # of one prompt of token ids: about as much text
WORTH = 0.5  # share of what is looked at from which on its beginning counts


class PrefixAffinity:
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
    """(hash, share) of every prefix, shortest first; share is of the prompt's beginning that is looked at."""
    parts = _parts(prompt)
    whole, known, key = sum(map(len, parts)), 0, 0
    for part in parts:
        key = hash((key, part))
        known += len(part)
        yield key, known / max(1, whole)


def _parts(prompt: Prompt) -> list[bytes]:
    """Messages or blocks from the prompt's beginning, at most MAX_PARTS and MAX_CHARACTERS."""
    match prompt:
        case ChatPrompt(messages, tool_use):
            parts, room = list[bytes](), MAX_CHARACTERS
            if tool_use.offered:  # templates write them before the messages
                parts.append(repr(tool_use.offered)[:room].encode("utf-8", "replace"))
                room -= len(parts[0])
            for message in messages[:MAX_PARTS]:
                calls = "".join(f"\0{call.name}\0{call.arguments}" for call in message.tool_calls)
                content = (message.content + calls)[: max(0, room)]
                parts.append(f"{message.role}\0{content}".encode("utf-8", "replace"))
                room -= len(content)
                if room <= 0:
                    break
            return parts
        case TextPrompt(text):
            beginning = text[:MAX_CHARACTERS]
            blocks = (beginning[i : i + BLOCK] for i in range(0, len(beginning), BLOCK))
            return [block.encode("utf-8", "replace") for block in blocks]
        case _:
            ids = prompt.token_ids[:MAX_TOKENS]
            return [array("q", ids[i : i + BLOCK]).tobytes() for i in range(0, len(ids), BLOCK)]
