"""The request log of vLLM."""

import re
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from penstock.planner_service.trace_importers.imported import EVENLY, ImportedTrace, evenly, trace_of
from penstock.planner_service.trace_importers.log_files import numbered, opened
from penstock.question_files.errors import FileError

LEAP_YEAR = 2000  # in place of the year, which vLLM does not log

# vllm/logger.py: "%(levelname)s %(asctime)s [%(fileinfo)s:%(lineno)d] %(message)s", with "%m-%d %H:%M:%S" as asctime. A
# prefix such as "(APIServer pid=1) " may precede it.
_VLLM_LINE = re.compile(
    r"(?:INFO|DEBUG) (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:[.,]\d+)? \[[^\]]*\] "
    r"(?:(?P<received>Received request)|(?P<details>Request)|(?P<generated>Generated response)) (?P<rest>.*)",
    re.DOTALL,
)
# Both are the last field of this name in the line: prompts and answers, which come before it, may contain anything.
_PROMPT_IDS = re.compile(r".*\bprompt_token_ids: (?:None|\[([\d, ]*)\])(?:, |\.)", re.DOTALL)
_OUTPUT_IDS = re.compile(r".*\boutput_token_ids: (?:None|[\[(]([\d, ]*)[\])]), finish_reason: ", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def from_vllm(path: Path) -> ImportedTrace:
    """Read the log of `vllm serve --enable-log-requests --enable-log-outputs`, without `--max-log-len`.

    Of each request it has `Received request ID: ...`, `prompt_token_ids: [...]` in the same line (older versions) or in
    `Request ID details: ...` (newer ones, with VLLM_LOGGING_LEVEL=DEBUG), and one `Generated response ID: ...` or, of a
    streamed reply, one line per delta, with `output_token_ids: [...]`. Requests that have not ended are left out. Arrivals
    are known to the second, without the year.

    Source: vllm-project/vllm, vllm/entrypoints/logger.py (`RequestLogger`) and vllm/logger.py; pull request 20707.

    Raises:
        FileError: It has no such lines, or the token ids are missing from them.
    """
    received = dict[str, tuple[int, datetime]]()
    prompt_tokens, output_tokens = dict[str, int](), dict[str, int]()
    answered = False
    with opened(path) as file:
        for line, text in numbered(path, file):
            match = _VLLM_LINE.search(_COLOUR.sub("", text))
            if match is None:
                continue
            if match["generated"] is not None:
                answered = True
                _add_output(path, line, match["rest"], output_tokens)
                continue
            name, _, fields = match["rest"].partition(":")
            if match["received"] is not None:
                received[name] = line, _moment(path, line, match.groups()[:5])
            ids = _PROMPT_IDS.match(fields)
            if ids is not None and ids[1] is not None:
                prompt_tokens[name.removesuffix(" details")] = _count(ids[1])
    if not received:
        raise FileError(f"{path}: no line 'Received request': start vLLM with --enable-log-requests")
    if not answered:
        raise FileError(f"{path}: no line 'Generated response': start vLLM with --enable-log-outputs")
    of_second = defaultdict[float, list[tuple[int, int]]](list)
    for (name, (line, _)), second in zip(received.items(), _seconds([at for _, at in received.values()]), strict=True):
        if not output_tokens.get(name):
            continue
        if name not in prompt_tokens:
            missing = "prompt_token_ids is missing; start vLLM with VLLM_LOGGING_LEVEL=DEBUG"
            raise FileError(f"{path}: line {line}: {missing}")
        if prompt_tokens[name]:
            of_second[second].append((prompt_tokens[name], output_tokens[name]))
    rows = [
        (arrival, *lengths, 0)
        for second, requests in of_second.items()
        for arrival, lengths in zip(evenly(second, 1.0, len(requests)), requests, strict=True)
    ]
    return trace_of(path, rows, len(received) - len(rows), EVENLY.format(width="second"))


def _add_output(path: Path, line: int, rest: str, output_tokens: dict[str, int]) -> None:
    """Count the output tokens of a line `Generated response`; `rest` is what follows these words."""
    reply = re.match(r"(\S+?)(?: \(streaming (delta|complete)\))?: output: ", rest)
    ids = _OUTPUT_IDS.match(rest)
    if reply is None or ids is None:
        raise FileError(f"{path}: line {line}: output_token_ids is missing")
    if reply[2] == "complete":
        if ids[1] is not None:  # of the whole reply; else the deltas have them
            output_tokens[reply[1]] = _count(ids[1])
    elif ids[1] is None:
        raise FileError(f"{path}: line {line}: output_token_ids is None")
    else:
        output_tokens[reply[1]] = output_tokens.get(reply[1], 0) + _count(ids[1])


def _moment(path: Path, line: int, parts: Sequence[str]) -> datetime:
    """Month, day, hour, minute and second of a line, in a leap year."""
    month, day, hour, minute, second = map(int, parts)
    try:
        return datetime(LEAP_YEAR, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        raise FileError(f"{path}: line {line}: {'-'.join(parts[:2])} {':'.join(parts[2:])} is no time") from None


def _seconds(moments: Sequence[datetime]) -> list[float]:
    """Seconds from one epoch for the lines of a log, in their order. A date far before the last one is of the next year."""
    leap = any((moment.month, moment.day) == (2, 29) for moment in moments)
    year, days = (LEAP_YEAR, 366) if leap else (LEAP_YEAR + 1, 365)
    result, passed_s, before = list[float](), 0.0, 0.0
    for moment in moments:
        at = moment.replace(year=year).timestamp()
        if at < before - days / 2 * 86_400:
            passed_s += days * 86_400
        before = at
        result.append(at + passed_s)
    return result


def _count(ids: str) -> int:
    return sum(1 for each in ids.split(",") if each.strip())
