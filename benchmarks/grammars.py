"""Structured output: two grammar libraries side by side, forms that random schemas ask for, and what a form costs the engine.

The libraries run over the JSON Schema test suite, whose folder `JSON_SCHEMA_SUITE` names (its draft2020-12, as in the
source distribution of the package jsonschema: json/tests/draft2020-12). xgrammar takes part where it is installed.
"""

import asyncio
import importlib.util
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.public_data import DataMissing
from benchmarks.report import write
from penstock.services.json_schema import fits
from penstock.types.prompts import ChatMessage, ChatPrompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.structured import StructuredOutput
from penstock.worker_service.engine.loop import LoopEngine
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_engine

FAMILY = Path(__file__).parents[1] / "models" / "family"
SCHEMAS = 300
MAX_TOKENS = 1_800  # of a reply: the model's context is 2,048
BATCH = 16
VOCABULARIES = (257, 128_000)

# (accepts these tokens, with a time for each mask)
Accepts = Callable[[list[int], list[float]], bool]


def run(rounds: int) -> None:
    figures: dict[str, Any] = asyncio.run(_engine_figures(rounds))
    suite = os.environ.get("JSON_SCHEMA_SUITE", "")
    if suite:
        figures["libraries"] = [
            _library(name, size, Path(suite))
            for name in ("llguidance", "xgrammar")
            if importlib.util.find_spec(name) is not None
            for size in VOCABULARIES
        ]
    write("grammars", figures)
    if not suite:
        raise DataMissing("JSON_SCHEMA_SUITE names no folder: the libraries were not compared")


async def _engine_figures(rounds: int) -> dict[str, Any]:
    engine = torch_engine(TorchEngineOptions(FAMILY / "medium", "medium", kv_tokens=65_536, max_running=BATCH))
    await engine.start()
    try:
        return {"schemas": await _schemas(engine), "throughput": await _throughput(engine, rounds)}
    finally:
        await engine.close()


async def _schemas(engine: LoopEngine) -> dict[str, int]:
    """Replies to random schemas, sampled: how many fit, by a check that knows nothing of the grammar."""
    rng = random.Random(1)
    schemas = [_schema(rng, 3) for _ in range(SCHEMAS)]
    valid = complete = 0
    for first in range(0, SCHEMAS, BATCH):
        part = schemas[first : first + BATCH]
        replies = await asyncio.gather(*(_reply(engine, f"s{i}", _form(s), MAX_TOKENS, i) for i, s in enumerate(part)))
        for schema, (text, tokens) in zip(part, replies, strict=True):
            if tokens < MAX_TOKENS:
                complete += 1
                valid += fits(json.loads(text), schema)
    return {"asked": SCHEMAS, "complete": complete, "valid": valid}


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """A schema of bounded size, of the keywords that agents use."""
    kind = rng.choice(
        ("object", "array") if depth == 3 else ("object", "array", "string", "integer", "boolean", "enum")
    )
    if depth == 0 and kind in ("object", "array"):
        kind = "integer"
    match kind:
        case "object":
            names = rng.sample(("id", "name", "kind", "tags", "size", "note", "when"), rng.randint(1, 4))
            properties = {name: _schema(rng, depth - 1) for name in names}
            required = rng.sample(names, rng.randint(0, len(names)))
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            return {"type": "array", "items": _schema(rng, depth - 1), "minItems": rng.randint(0, 2), "maxItems": 3}
        case "string":
            return {"type": "string", "maxLength": rng.randint(1, 12)}
        case "integer":
            return {"type": "integer", "minimum": 0, "maximum": rng.choice((9, 100, 70_000))}
        case "boolean":
            return {"type": "boolean"}
        case _:
            return {"enum": rng.sample(("red", "green", 1, 2.5, None, True), 3)}


async def _throughput(engine: LoopEngine, rounds: int) -> dict[str, Any]:
    """Tokens per second of CPU of a batch of greedy replies of one length, with and without a grammar, in turns."""
    form = StructuredOutput(regex=r"(.|\n){150,}")
    free: list[float] = []
    formed: list[float] = []
    for _ in range(2 * rounds):
        for structured, rates in ((None, free), (form, formed)):
            began = time.process_time()
            sampling = SamplingParams(0.0, max_tokens=150, structured_output=structured, ignore_eos=structured is None)
            counts = await asyncio.gather(*(_run(engine, f"t{i}", sampling, f"Write {i}.") for i in range(BATCH)))
            rates.append(sum(count for _, count in counts) / (time.process_time() - began))
    ratios = [a / b for a, b in zip(formed, free, strict=True)]
    return {
        "batch": BATCH,
        "free_tokens_per_cpu_s": round(statistics.median(free)),
        "formed_tokens_per_cpu_s": round(statistics.median(formed)),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def _form(schema: dict[str, Any]) -> StructuredOutput:
    return StructuredOutput(json_schema=json.dumps(schema))


async def _reply(engine: LoopEngine, name: str, form: StructuredOutput, most: int, seed: int) -> tuple[str, int]:
    return await _run(engine, name, SamplingParams(1.0, 1.0, seed, most, structured_output=form), "Fill in the form.")


async def _run(engine: LoopEngine, name: str, sampling: SamplingParams, text: str) -> tuple[str, int]:
    """(text, tokens) of a reply."""
    request = GenerationRequest(name, ChatPrompt((ChatMessage("user", text),)), sampling)
    frames = [event async for event in engine.generate(request) if isinstance(event, TokenFrame)]
    return "".join(frame.text for frame in frames), sum(len(frame.token_ids) for frame in frames)


def _library(name: str, size: int, suite: Path) -> dict[str, Any]:
    """One library with a vocabulary of one size over the suite: what it refuses, and whether it is right about the rest."""
    tokens = _vocabulary(size)
    compile_ = _llguidance(tokens) if name == "llguidance" else _xgrammar(tokens)
    separators = (",", ":") if name == "llguidance" else (", ", ": ")
    encode = _encoder(tokens)
    counts = dict.fromkeys(("schemas", "refused", "valid", "valid_accepted", "invalid", "invalid_accepted", "exact"), 0)
    compile_s: list[float] = []
    mask_s: list[float] = []
    for group in _groups(suite):
        counts["schemas"] += 1
        began = time.perf_counter()
        try:
            accepts = compile_(json.dumps(group["schema"]))
        except Exception:
            counts["refused"] += 1
            continue
        compile_s.append(time.perf_counter() - began)
        exact = True
        for test in group["tests"]:
            text = json.dumps(test["data"], ensure_ascii=False, separators=separators)
            accepted = accepts(encode(text.encode("utf-8", "surrogatepass")), mask_s)
            kind = "valid" if test["valid"] else "invalid"
            counts[kind] += 1
            counts[f"{kind}_accepted"] += accepted
            exact &= accepted == test["valid"]
        counts["exact"] += exact
    return {
        "library": name,
        "vocabulary": size,
        **counts,
        "compile_ms": _percentiles(compile_s, 1e3),
        "mask_us": _percentiles(mask_s, 1e6),
    }


def _percentiles(values: list[float], scale: float) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(values, p)) * scale, 2) for p in (50, 95, 99)}


def _groups(suite: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(suite.glob("*.json")):
        yield from json.loads(path.read_text())


def _vocabulary(size: int) -> list[bytes]:
    """Single bytes, then the commonest words and pieces of the Python sources installed here; the last ends a reply."""
    import collections
    import re

    tokens = [bytes([byte]) for byte in range(256)]
    if size > 300:
        counts: collections.Counter[str] = collections.Counter()
        for path in sorted(Path(json.__file__).parents[1].rglob("*.py"))[:6000]:
            for piece in re.findall(r" ?\w+| ?[^\w\s]{1,4}|\s+", path.read_text("utf-8", "replace")[:20_000]):
                counts.update((piece[:24], piece[:4], piece[:6]))
        known = set(tokens)
        for piece, _ in counts.most_common(2 * size):
            if len(tokens) == size - 1:
                break
            if (token := piece.encode()) not in known:
                known.add(token)
                tokens.append(token)
        tokens += [b"<unused%d>" % i for i in range(size - 1 - len(tokens))]
    return [*tokens, b"<|end|>"]


def _encoder(tokens: list[bytes]) -> Callable[[bytes], list[int]]:
    """Longest match first."""
    ids = {token: i for i, token in reversed([*enumerate(tokens[:-1])])}
    longest = max(map(len, tokens))

    def encode(text: bytes) -> list[int]:
        parts, at = list[int](), 0
        while at < len(text):
            length = next(n for n in range(min(longest, len(text) - at), 0, -1) if text[at : at + n] in ids)
            parts.append(ids[text[at : at + length]])
            at += length
        return parts

    return encode


def _llguidance(tokens: list[bytes]) -> Callable[[str], Accepts]:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    end, encode = len(tokens) - 1, _encoder(tokens)

    class Wrapped:
        eos_token_id, bos_token_id, special_token_ids = end, None, (end,)

        def __init__(self) -> None:
            self.tokens = tokens

        def __call__(self, text: bytes) -> list[int]:
            return encode(text)

    vocabulary = LLTokenizer(TokenizerWrapper(Wrapped()), n_vocab=len(tokens), eos_token=end)

    def compile_(schema: str) -> Accepts:
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_json_schema(schema), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())

        def accepts(ids: list[int], mask_s: list[float]) -> bool:
            place = matcher.deep_copy()
            for token in ids:
                began = time.perf_counter()
                place.compute_bitmask()
                mask_s.append(time.perf_counter() - began)
                if not place.consume_token(token):
                    return False
            return bool(place.is_accepting())

        return accepts

    return compile_


def _xgrammar(tokens: list[bytes]) -> Callable[[str], Accepts]:
    xgrammar: Any = importlib.import_module("xgrammar")
    end = len(tokens) - 1
    info = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[end])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile_(schema: str) -> Accepts:
        grammar = compiler.compile_json_schema(schema, strict_mode=False)

        def accepts(ids: list[int], mask_s: list[float]) -> bool:
            place, mask = xgrammar.GrammarMatcher(grammar), xgrammar.allocate_token_bitmask(1, len(tokens))
            for token in ids:
                began = time.perf_counter()
                place.fill_next_token_bitmask(mask)
                mask_s.append(time.perf_counter() - began)
                if not place.accept_token(token):
                    return False
            return bool(place.accept_token(end))

        return accepts

    return compile_
