"""Which instance takes a request, and how long its prompt is: pure."""

import zlib
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from penstock.router_service.routing.placement import NotPlaced, Placed, PlacementCandidate, free_places, place
from penstock.router_service.routing.prefix_affinity import (
    MAX_CHARACTERS,
    MAX_PARTS,
    PrefixAffinity,
    _parts,
    prefixes_of,
)
from penstock.router_service.routing.prompt_length import PromptLengths
from penstock.services.domain.dispatch import CONTEXT_SHARE, NOTHING_SENT, REQUEST_TOKENS, SPILL_S, Sent
from penstock.services.domain.instances import InstanceRecord, Load, ModelCard, Role
from penstock.types.mesh_status import StagePlace
from penstock.types.prompts import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt

CARD = ModelCard("small", "m", "d", "torch", 100, 10, 16, 4)
ROOMY = replace(CARD, max_requests=16)


def worker(name: str, running: int = 0, tokens: int = 10, place: StagePlace | None = None) -> InstanceRecord:
    load = Load((tokens,) * running, (), 9, 1.0)
    return InstanceRecord(name, Role.WORKER, "h:1", 1.0, 1, 3.0, model=CARD, load=load, place=place)


def chosen(candidates: list[InstanceRecord], **more: object) -> str:
    options: dict[str, object] = {
        "request_id": "r",
        "tokens": 8,
        "in_flight": {},
        "full": set(),
        "ejected": set(),
    } | more
    found = place([*map(PlacementCandidate.of, candidates)], **options)  # type: ignore[arg-type]
    assert isinstance(found, Placed)
    return found.record.instance_id


def test_a_request_goes_where_the_fewest_prompt_tokens_are_still_to_be_computed() -> None:
    """However many requests decode elsewhere, within reason: these delay its first token less."""
    waits = replace(worker("a", 1), model=ROOMY, load=Load((2000,), (), 9, 1.0, pending_tokens=2000))
    decoding = replace(worker("b", 6, tokens=100), model=ROOMY)
    assert chosen([waits, decoding]) == "b"
    assert chosen([replace(waits, load=Load((2000,), (), 9, 1.0, pending_tokens=0)), decoding]) == "a"
    assert chosen([waits, decoding], in_flight={"b": Sent(1, 3000)}) == "a", "what was sent since counts"
    queued = replace(worker("a"), load=Load((), (900,), 9, 1.0))
    assert chosen([queued, decoding]) == "b", "where an engine does not tell, queued requests are to be computed"


def test_a_stage_passes_on_what_would_wait_much_longer_there() -> None:
    """By the expected wait for the prompt, long before its instances are full; a stage that is only busier keeps it."""

    def busy(name: str, stage: int, pending: int, rate: float = 1000.0) -> InstanceRecord:
        to = (100, 1000)[stage]
        load = Load((50,), (), 9, 1.0, pending_tokens=pending, prompt_tokens_per_s=rate)
        return replace(worker(name, place=StagePlace(stage, 0, to)), model=ROOMY, load=load)

    wait = int(1000 * SPILL_S)
    assert chosen([busy("a", 0, wait), busy("b", 1, 0)]) == "a"
    assert chosen([busy("a", 0, wait + 1), busy("b", 1, 0)]) == "b"
    assert chosen([busy("a", 0, wait + 1), busy("b", 1, 0)], in_flight={"b": Sent(1, 10)}) == "a"
    assert chosen([busy("a", 0, 9 * wait, rate=0.0), busy("b", 1, 0)]) == "a", "without a measured rate it stays"
    assert chosen([busy("a", 0, 0), busy("b", 1, 9 * wait)], tokens=500) == "b", "not to a stage that is too short"


def test_the_instance_just_left_is_avoided_unless_it_is_the_only_one() -> None:
    assert chosen([worker("a"), worker("b", 2)], avoid="a") == "b"
    assert chosen([worker("a")], avoid="a") == "a"


def test_a_request_goes_to_the_stage_that_covers_its_length_and_to_the_next_while_that_is_full() -> None:
    short = [worker("a", 3, place=StagePlace(0, 0, 64)), worker("b", 2, place=StagePlace(0, 0, 80))]
    long = [worker("c", 1, place=StagePlace(1, 64, 256)), worker("d", 0, place=StagePlace(1, 64, 256))]
    assert chosen(short + long, tokens=8) == "b", "the least loaded within the stage, however idle the others"
    assert chosen(short + long, tokens=70) == "b", "a boundary is each instance's own"
    assert chosen(short + long, tokens=100) == "d"
    assert chosen(short + long, tokens=9999) == "d", "the last stage takes what is longer than all"
    assert chosen(short + long, tokens=8, full={"a", "b"}) == "d"
    assert chosen(short, tokens=100) == "b", "better too short a stage than none"
    assert chosen(short + long, tokens=8, avoid="b") == "a"


def test_a_known_prefix_counts_as_half_of_the_prompt_or_one_request_less() -> None:
    pair = [worker("a", 1), worker("b", 1)]
    assert [chosen(pair, prefix_holder=name) for name in "ab"] == ["a", "b"]
    assert chosen([worker("a", 3), worker("b", 1)], prefix_holder="a") == "b"
    assert chosen(pair, prefix_holder="gone") == chosen(pair)
    busy = replace(worker("a", 1), load=Load((900,), (), 9, 1.0, pending_tokens=900))
    assert chosen([busy, worker("b", 1)], prefix_holder="a", tokens=4000) == "a"
    assert chosen([busy, worker("b", 1)], prefix_holder="a", tokens=400) == "b"


def slow_choice(
    records: list[InstanceRecord],
    request_id: str,
    in_flight: dict[str, Sent],
    full: set[str],
    ejected: set[str],
    holder: str,
) -> str | None:
    """What `place` says it does, for a tier without stages, in the plainest words."""
    free = [
        r
        for r in records
        if r.load is not None
        and r.model is not None
        and r.instance_id not in ejected | full
        and r.load.requests + in_flight.get(r.instance_id, NOTHING_SENT).requests < r.model.max_requests
    ]

    def cost(r: InstanceRecord) -> tuple[float, bool, int]:
        assert r.load is not None
        assert r.model is not None
        sent, knows = in_flight.get(r.instance_id, NOTHING_SENT), r.instance_id == holder
        requests = r.load.requests + sent.requests
        work: float = sum(r.load.queued_tokens) + sent.tokens
        work += REQUEST_TOKENS * requests + CONTEXT_SHARE * (r.load.tokens + sent.tokens)
        checksum = zlib.crc32(f"{r.instance_id}/{request_id}".encode())
        return (work - REQUEST_TOKENS * knows) / r.model.max_requests, not knows, checksum

    return min(free, key=cost).instance_id if free else None


def test_the_choice_is_the_one_that_its_rule_says_whatever_the_mesh() -> None:
    rng = Random(11)
    for case in range(2000):
        names = [f"w{i}" for i in range(rng.randint(1, 12))]
        records = [
            replace(
                worker(name),
                load=Load((rng.choice([5, 5, 90]),) * rng.randint(0, 3), (7,) * rng.randint(0, 2), 9, 1.0),
                model=replace(CARD, max_requests=rng.choice([2, 4, 4, 8])),
            )
            for name in names
        ]
        in_flight = {name: Sent(sent := rng.randint(1, 3), 8 * sent) for name in names if rng.random() < 0.4}
        full, ejected = ({name for name in names if rng.random() < share} for share in (0.2, 0.1))
        holder = rng.choice([*names, ""])
        candidates = [*map(PlacementCandidate.of, records)]
        found = place(
            candidates,
            request_id=f"r{case}",
            tokens=8,
            in_flight=in_flight,
            full=full,
            ejected=ejected,
            prefix_holder=holder,
        )
        name = found.record.instance_id if isinstance(found, Placed) else None
        assert name == slow_choice(records, f"r{case}", in_flight, full, ejected, holder)
        room = free_places(candidates, in_flight=in_flight, full=full, ejected=ejected)
        assert (room is None) == (found == NotPlaced(full=False))
        assert (room == 0) == (found == NotPlaced(full=True))


def test_free_places_are_how_many_requests_can_be_placed_one_after_the_other() -> None:
    candidates = [*map(PlacementCandidate.of, [worker("a", 1), worker("b", 4), worker("c"), worker("d"), worker("e")])]
    state: dict[str, Any] = {"full": {"d"}, "ejected": {"e"}}
    in_flight, placed = {"c": Sent(2, 16)}, 0
    room = free_places(candidates, in_flight=in_flight, **state)
    while isinstance(
        found := place(candidates, request_id=f"r{placed}", tokens=8, in_flight=in_flight, **state), Placed
    ):
        sent = in_flight.get(found.record.instance_id, NOTHING_SENT)
        in_flight[found.record.instance_id] = Sent(sent.requests + 1, sent.tokens + 8)
        placed += 1
    assert placed == room == 5


def chat(*said: str) -> ChatPrompt:
    return ChatPrompt(tuple(ChatMessage("assistant" if i % 2 else "user", text) for i, text in enumerate(said)))


@pytest.mark.parametrize(
    ("first", "later", "other"),
    [
        (chat("x" * 90), chat("x" * 90, "an answer", "and now?"), chat("y" * 90)),
        (TextPrompt("x" * 600), TextPrompt("x" * 512 + "z" * 100), TextPrompt("x" * 200)),
        (TokenPrompt((1,) * 600), TokenPrompt((1,) * 512 + (2,) * 90), TokenPrompt((2,) * 600)),
    ],
)
def test_a_conversation_is_known_where_its_beginning_was_computed(first: Prompt, later: Prompt, other: Prompt) -> None:
    prefix_holder = PrefixAffinity()
    assert prefix_holder.where("t", prefixes_of(first)) == ""
    prefix_holder.learn("t", prefixes_of(first), "a")
    assert prefix_holder.where("t", prefixes_of(first)) == prefix_holder.where("t", prefixes_of(later)) == "a"
    assert prefix_holder.where("u", prefixes_of(later)) == ""
    assert prefix_holder.where("t", prefixes_of(other)) == ""
    assert prefix_holder.where("t", prefixes_of(later, "a salt")) == "", "its KV is not for requests with a salt"
    prefix_holder.learn("t", prefixes_of(later, "a salt"), "c")
    assert prefix_holder.where("t", prefixes_of(later, "a salt")) == "c"
    assert prefix_holder.where("t", prefixes_of(later)) == "a"
    prefix_holder.learn("t", prefixes_of(later), "b")
    assert prefix_holder.where("t", prefixes_of(later)) == "b"


def test_a_beginning_that_is_less_than_half_does_not_count_and_old_ones_are_forgotten() -> None:
    prefix_holder = PrefixAffinity(most=2)
    prefix_holder.learn("t", prefixes_of(chat("a short beginning")), "a")
    assert prefix_holder.where("t", prefixes_of(chat("a short beginning", "x" * 100))) == ""
    prefix_holder.learn("t", prefixes_of(chat("two")), "a")
    prefix_holder.learn("t", prefixes_of(chat("three")), "a")
    assert prefix_holder.where("t", prefixes_of(chat("a short beginning"))) == ""
    assert prefix_holder.where("t", prefixes_of(chat("three"))) == "a"


LONG = "x" * 2_000_000


@pytest.mark.parametrize(
    "prompt",
    [
        TextPrompt(LONG),
        chat(LONG),
        chat("a beginning", LONG, LONG),
        chat(*["x"] * 100_000),
        TokenPrompt((1,) * 1_000_000),
    ],
    ids=["text", "one message", "long messages", "many messages", "token ids"],
)
def test_only_the_beginning_of_a_long_prompt_is_looked_at(prompt: Prompt) -> None:
    """However long it is: so many parts and so many bytes, and one with the same beginning is known as well."""
    parts = _parts(prompt)
    assert len(parts) <= MAX_PARTS
    assert sum(map(len, parts)) <= 8 * MAX_CHARACTERS
    prefix_holder = PrefixAffinity()
    prefix_holder.learn("t", prefixes_of(prompt), "a")
    match prompt:
        case TextPrompt(text):
            longer: Prompt = TextPrompt(text + "more")
        case ChatPrompt(messages):
            longer = ChatPrompt((*messages, ChatMessage("user", "more")))
        case _:
            longer = TokenPrompt((*prompt.token_ids, 2))
    assert prefix_holder.where("t", prefixes_of(longer)) == "a"


def test_each_tier_learns_its_own_tokens_per_character() -> None:
    lengths = PromptLengths()
    assert lengths.estimate("small", TextPrompt("x" * 400)) == 100, "four characters to a token, until told otherwise"
    lengths.learn("small", TextPrompt("x" * 100), 120)
    assert lengths.estimate("small", TextPrompt("x" * 400)) == 480
    assert lengths.estimate("large", TextPrompt("x" * 400)) == 100
    for _ in range(100):
        lengths.learn("small", ChatPrompt((ChatMessage("user", "x" * 100),)), 50)
    assert lengths.estimate("small", TextPrompt("x" * 400)) == 200
    lengths.learn("small", TextPrompt(""), 7)
    assert lengths.estimate("small", TextPrompt("x" * 400)) == 200, "an empty prompt tells nothing"
    assert lengths.estimate("small", TokenPrompt((1, 2, 3))) == 3
