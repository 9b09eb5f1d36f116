"""Filling a small JSON object from a sentence, and short honest replies to smalltalk."""

import json
import random
from collections.abc import Callable

from models.training.drafts import Draft
from models.training.problems import Message
from models.training.smalltalk import SMALLTALK
from models.training.things import NAMES, THINGS
from models.training.wording import Phrasing

CITIES = ("Rome", "Paris", "Oslo", "Lima", "Cairo", "Delhi", "Tokyo", "Bern", "Kyiv", "Quito", "Prague", "Dublin")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
COLOURS = ("red", "blue", "green", "black", "white", "yellow", "brown", "grey")
# A sentence's patterns, and the fields that can be read from it.
SENTENCES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        (
            "{name} is {age} years old and [lives|works] in {city}.", "{name} [lives|works] in {city} and is {age}[ years old|].",
            "[My friend|My neighbour|A man called|Someone named] {name}, {age}, [comes from|lives in|is from] {city}.",
            "In {city} [lives|there lives] {name}, who is {age}[ years old|].",
        ),
        ("name", "age", "city"),
    ),
    (
        (
            "{name} [orders|buys|wants|needs] {count} {color} {item}[ on {day}| for {day}].",
            "On {day} {name} [bought|orders|needs] {count} {color} {item}.",
            "[Please send|Send|Deliver] {count} {color} {item} to {name} on {day}.",
        ),
        ("name", "count", "color", "item", "day"),
    ),
    (
        (
            "The meeting [with {name}|of {name}] is on {day} at {hour} o'clock in {city}.",
            "{name} [comes|arrives] to {city} on {day} at {hour} o'clock.",
            "[Meet|See|Visit] {name} in {city} on {day} at {hour} o'clock.",
        ),
        ("name", "day", "hour", "city"),
    ),
    (
        (
            "[One of the|These|The] {item} cost {price} [euros|coins|dollars] in {city}.",
            "In {city} the {item} [cost|are] {price} [euros|coins|dollars].",
            "You pay {price} [euros|coins|dollars] for {item} in {city}.",
        ),
        ("item", "price", "city"),
    ),
)  # fmt: skip
FILL = (
    "[Fill in|Fill|Complete|Write|Make|Return] [this|the] JSON[ object|] [from|for|using|with] the sentence. {form}\n{sentence}",
    "{sentence}\n[Fill in|Fill|Complete|Return as|Write as|Give me] [JSON|this JSON|a JSON object]: {form}",
    "[Extract|Read|Take|Find|Get] {fields} [as JSON|into JSON|in JSON form] [from|out of]: {sentence}",
    "{sentence} [Give|Return|Write|Extract] {fields} as [JSON|a JSON object].",
)
_DRAW: dict[str, Callable[[random.Random], object]] = {
    "name": lambda rng: rng.choice(NAMES),
    "city": lambda rng: rng.choice(CITIES),
    "day": lambda rng: rng.choice(DAYS),
    "color": lambda rng: rng.choice(COLOURS),
    "item": lambda rng: rng.choice(THINGS),
    "age": lambda rng: rng.randint(2, 99),
    "count": lambda rng: rng.randint(2, 60),
    "hour": lambda rng: rng.randint(1, 12),
    "price": lambda rng: rng.randint(2, 400),
}


def form(rng: random.Random, level: int, say: Phrasing) -> Draft:
    """A JSON object of some of the sentence's fields, in the order in which they are asked for."""
    patterns, fields = rng.choice([sentence for sentence in SENTENCES if len(sentence[1]) >= min(level, 3)])
    values = {field: _DRAW[field](rng) for field in fields}
    sentence = say.phrase(patterns, **values)
    present = [field for field in fields if str(values[field]) in sentence]
    chosen_fields = rng.sample(present, min(len(present), (1, 2, 3, 3, 5)[level - 1]))
    empty = json.dumps({field: 0 if isinstance(values[field], int) else "" for field in chosen_fields})
    prompt = say(
        FILL,
        form=empty,
        sentence=sentence,
        fields=" and ".join(chosen_fields) if len(chosen_fields) < 3 else ", ".join(chosen_fields),
    )
    answer = json.dumps({field: values[field] for field in chosen_fields})
    key = "form " + json.dumps({field: values[field] for field in sorted(values)}) + " ".join(sorted(chosen_fields))
    return Draft((Message("user", prompt),), [], answer, (key,))


def smalltalk(rng: random.Random, level: int, say: Phrasing) -> Draft:
    """What a person might say that is no task; it has no wordings of its own."""
    entry = rng.choice(SMALLTALK)
    written = entry.prompt[:1].upper() + entry.prompt[1:] if say.rng.random() < 0.5 else entry.prompt
    if written[-1].isalnum() and say.rng.random() < 0.4:
        written += say.rng.choice(".!?")
    return Draft((Message("user", written),), [], entry.reply, (f"smalltalk {entry.prompt}",))
