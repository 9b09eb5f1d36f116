"""Which instance has recently computed the beginning of a prompt: its prefix cache may still contain it. No I/O."""

from array import array
from collections import OrderedDict

from penstock.types.prompts import ChatPrompt, Prompt, TextPrompt

MAX_PREFIXES = 20_000  # remembered; the least recently used is forgotten first
BLOCK = 256  # characters, or token ids, of a prompt that is not a chat
MAX_PARTS = 256  # messages or blocks of one prompt that are looked at, so that long prompts cost no more
MAX_CHARACTERS = BLOCK * MAX_PARTS  # of one prompt's text that are looked at
MAX_TOKENS = MAX_CHARACTERS // 4  # of one prompt of token ids: about as much text
MIN_SHARE = 0.5  # of what is looked at: a shorter prefix does not count


Prefixes = tuple[tuple[int, float], ...]
"""(hash, share) of every prefix of a prompt, shortest first; share: of the beginning of the prompt that is looked at."""


class PrefixAffinity:
    """Remembers where prompts were computed, by every prefix of whole messages or blocks."""

    def __init__(self, most: int = MAX_PREFIXES) -> None:
        self._most = most
        self._where: OrderedDict[tuple[str, int], str] = OrderedDict()

    def learn(self, tier: str, prefixes: Prefixes, instance_id: str) -> None:
        """This instance has computed a prompt with these prefixes."""
        for key, _ in prefixes:
            self._where[tier, key] = instance_id
            self._where.move_to_end((tier, key))
        while len(self._where) > self._most:
            self._where.popitem(last=False)

    def where(self, tier: str, prefixes: Prefixes) -> str:
        """The instance that has computed the longest part of a prompt, at least half of it; empty if there is none."""
        instance_of_longest = ""
        for key, share in prefixes:
            instance_id = self._where.get((tier, key))
            if instance_id is None:
                break
            if share >= MIN_SHARE:
                instance_of_longest = instance_id
        return instance_of_longest


def prefixes_of(prompt: Prompt, cache_salt: str = "") -> Prefixes:
    """The prefixes of a prompt, to be computed once per request. They differ for requests that share no KV."""
    parts, key = _parts(prompt), hash(cache_salt) if cache_salt else 0
    if len(parts) == 1:
        return ((hash((key, parts[0])), 1.0),)
    prefixes, whole, length = [], max(1, sum(map(len, parts))), 0
    for part in parts:
        key = hash((key, part))
        length += len(part)
        prefixes.append((key, length / whole))
    return tuple(prefixes)


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
