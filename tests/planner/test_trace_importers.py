"""Logs of other servers as traces: what the planner then reads, and faults by line, entry and field."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.planner_service.files.measured import read_trace
from penstock.planner_service.trace_importers.imported import ImportedTrace
from penstock.planner_service.trace_importers.litellm import from_litellm
from penstock.planner_service.trace_importers.openai import from_openai
from penstock.planner_service.trace_importers.vllm import from_vllm
from penstock.question_files.errors import FileError

HEAD = "(APIServer pid=1) INFO {} [logger.py:49] "
TRAP = (
    r"""'prompt_token_ids: [1, 2, 3, 4, 5, 6], \n Received request x: output_token_ids: [1, 2], finish_reason: stop'"""
)


def rows(trace: ImportedTrace) -> list[tuple[float, int, int]]:
    work = trace.requests
    return list(
        zip(work.arrival_s.round(3).tolist(), work.input_tokens.tolist(), work.output_tokens.tolist(), strict=True)
    )


def received(name: str, at: str, prompt_ids: Any) -> str:
    """A line of older versions of vLLM, whose prompt looks like the fields that follow it."""
    fields = f"prompt: {TRAP}, params: SamplingParams(n=1), prompt_token_ids: {prompt_ids}, prompt_embeds shape: None"
    return HEAD.format(at) + f"Received request {name}: {fields}, lora_request: None.\n"


def generated(name: str, at: str, output_ids: Any, kind: str = "") -> str:
    fields = f"output: {TRAP}, output_token_ids: {output_ids}, finish_reason: stop"
    return HEAD.format(at) + f"Generated response {name}{kind}: {fields}\n"


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_vllm_requests_have_the_lengths_of_their_token_ids(tmp_path: Path) -> None:
    """Also of streamed replies, of a log that crosses the year, and of prompts that look like log lines."""
    log = written(
        tmp_path / "vllm.log",
        "INFO 12-31 23:59:57 [api_server.py:1] Started\n"
        + received("a", "12-31 23:59:58", [5, 6, 7])
        + received("b", "12-31 23:59:58", [5])
        + generated("b", "12-31 23:59:59", [1], " (streaming delta)")
        + generated("b", "12-31 23:59:59", [2, 3], " (streaming delta)")
        + generated("b", "12-31 23:59:59", None, " (streaming complete)")
        + generated("a", "01-01 00:00:00", [1, 2])
        + received("c", "01-01 00:00:01", [5, 6])
        + received("aborted", "01-01 00:00:01", [5, 6])
        + generated("c", "01-01 00:00:02", [4])
        + generated("before-the-log", "01-01 00:00:02", [4]),
    )
    trace = from_vllm(log)
    assert rows(trace) == [(0.0, 3, 2), (0.5, 1, 3), (3.25, 2, 1)]
    assert trace.left_out == 1
    assert "second" in trace.spread


def test_vllm_of_newer_versions_has_prompts_in_debug_lines(tmp_path: Path) -> None:
    debug = "\x1b[32mDEBUG\x1b[0m 02-29 10:00:00 [logger.py:40] Request a details: "
    info = HEAD.format("02-29 10:00:00") + "Received request a: params: SamplingParams(n=1), lora_request: None.\n"
    answer = generated("a", "02-29 10:00:01", [1, 2])
    detailed = written(
        tmp_path / "debug.log",
        debug + f"prompt: {TRAP}, prompt_token_ids: [7, 8, 9, 10], prompt_embeds shape: None.\n" + info + answer,
    )
    assert rows(from_vllm(detailed)) == [(0.0, 4, 2)]
    with pytest.raises(FileError, match=r"info.log: line 1: prompt_token_ids is missing; .*DEBUG"):
        from_vllm(written(tmp_path / "info.log", info + answer))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "Received request"),
        (received("a", "01-01 00:00:00", [1]), "--enable-log-outputs"),
        (
            received("a", "01-01 00:00:00", [1]) + generated("a", "01-01 00:00:00", None),
            "line 2: output_token_ids is None",
        ),
        (received("a", "13-01 00:00:00", [1]), "line 1: 13-01 00:00:00 is no time"),
        (received("a", "01-01 00:00:00", []) + generated("a", "01-01 00:00:00", [1]), "no requests with prompt"),
        (HEAD.format("01-01 00:00:00") + "Generated response a: cut", "line 1: output_token_ids is missing"),
    ],
)
def test_faults_of_a_vllm_log_are_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(FileError, match=problem):
        from_vllm(written(tmp_path / "vllm.log", text))


SPENT = [
    {"request_id": "2", "startTime": "2026-05-01T12:00:02.500Z", "prompt_tokens": 30, "completion_tokens": 4, "x": 1},
    {"request_id": "1", "startTime": "2026-05-01T14:00:00+02:00", "prompt_tokens": 10, "completion_tokens": 5},
    {"request_id": "3", "startTime": "2026-05-01 12:00:03.000", "prompt_tokens": 0, "completion_tokens": 0},
]


def test_litellm_logs_are_read_in_each_form(tmp_path: Path) -> None:
    """A list, a page, CSV, gzipped; times with any offset; failed calls are left out."""
    lines = [",".join(("x", "startTime", "prompt_tokens", "completion_tokens"))]
    lines += [f"-,{e['startTime']},{e['prompt_tokens']},{e['completion_tokens']}" for e in SPENT]
    zipped = tmp_path / "spend.json.gz"
    zipped.write_bytes(gzip.compress(json.dumps(SPENT).encode()))
    for path in (
        written(tmp_path / "spend.json", json.dumps(SPENT)),
        written(tmp_path / "page.json", json.dumps({"data": SPENT, "total": 3})),
        written(tmp_path / "spend.csv", "\n".join(lines)),
        zipped,
    ):
        trace = from_litellm(path)
        assert rows(trace) == [(0.0, 10, 5), (2.5, 30, 4)]
        assert (trace.left_out, trace.spread) == (1, "")


def test_litellm_logs_say_what_providers_had_cached(tmp_path: Path) -> None:
    """In either place of the metadata, as an object or as JSON; some providers do not count it among the prompt tokens."""

    def entry(metadata: Any) -> dict[str, Any]:
        return {"startTime": "2026-05-01T12:00:00Z", "prompt_tokens": 30, "completion_tokens": 4, "metadata": metadata}

    def usage(name: str, cached: Any) -> dict[str, Any]:
        return {name: {"prompt_tokens_details": {"cached_tokens": cached}}, "status": "success"}

    first, second = usage("additional_usage_values", 20), usage("usage_object", 12)
    others: tuple[Any, ...] = (
        None,
        {},
        "no JSON",
        {"usage_object": {"prompt_tokens_details": None}},
        f'{{"usage_object": {"9" * 5000}}}',
        usage("usage_object", 100),
    )
    log = [entry(each) for each in (first, json.dumps(second), *others)]
    found = from_litellm(written(tmp_path / "spend.json", json.dumps(log))).requests
    assert found.cached_tokens.tolist() == [20, 12, 0, 0, 0, 0, 0, 29]
    wrong = [entry(usage("usage_object", -1))]
    with pytest.raises(FileError, match=r"\[0\]: metadata.usage_object.prompt_tokens_details: cached_tokens must be"):
        from_litellm(written(tmp_path / "wrong.json", json.dumps(wrong)))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[{", "line 1: no JSON"),
        ("3", "list or object"),
        ("[" * 100_000, "no JSON"),
        (f'[{{"prompt_tokens": {"9" * 5000}}}]', "spend.json: no usable JSON: a whole number has too many digits"),
        ('{"rows": []}', "data: is missing"),
        ("[3]", r"\[0\]: must be an object"),
        ("[]", "no requests"),
        ('[{"prompt_tokens": 1, "completion_tokens": 1}]', r"\[0\]: startTime is missing"),
        ('[{"startTime": 5, "prompt_tokens": 1, "completion_tokens": 1}]', r"\[0\]: startTime '5' is not a time"),
        ('[{"startTime": "2026-05-01", "completion_tokens": 1}]', r"\[0\]: prompt_tokens is missing"),
        ('[{"prompt_tokens": -1, "completion_tokens": 1}]', r"prompt_tokens must be a whole number"),
        ('[{"prompt_tokens": NaN, "completion_tokens": 1}]', r"prompt_tokens 'nan' is not a number"),
        ('[{"prompt_tokens": 1e30, "completion_tokens": 1}]', r"prompt_tokens must be a whole number"),
        ('[{"prompt_tokens": true, "completion_tokens": 1}]', r"prompt_tokens 'True' is not a number"),
    ],
)
def test_faults_of_spend_logs_are_named(tmp_path: Path, content: str, problem: str) -> None:
    with pytest.raises(FileError, match=problem):
        from_litellm(written(tmp_path / "spend.json", content))
    with pytest.raises(FileError, match=r"spend.csv: line 1: no column completion_tokens"):
        from_litellm(written(tmp_path / "spend.csv", "startTime,prompt_tokens\n2026-05-01,3"))
    with pytest.raises(FileError, match="No such file"):
        from_litellm(tmp_path / "none.json")


def page(*results: dict[str, Any], **times: int) -> dict[str, Any]:
    return {"object": "page", "data": [{"start_time": 60, "end_time": 120, **times, "results": list(results)}]}


def test_the_requests_of_openai_buckets_are_spread_over_them(tmp_path: Path) -> None:
    usage = {"num_model_requests": 3, "input_tokens": 300, "output_tokens": 31, "model": None}
    later = page({**usage, "num_model_requests": 1}, start_time=180, end_time=240)
    wanted = [(0.0, 100, 10), (20.0, 100, 10), (40.0, 100, 10), (140.0, 300, 31)]
    for name, content in (
        ("list", [page(usage), page(), later]),
        ("page", {"data": page(usage)["data"] + later["data"]}),
    ):
        trace = from_openai(written(tmp_path / f"{name}.json", json.dumps(content)))
        assert rows(trace) == wanted
        assert "bucket of 60 s" in trace.spread
    table = "start_time,end_time,start_time_iso,num_model_requests,input_tokens,output_tokens\n"
    table += "60,120,x,3,300,31\n120,180,x,,,\n180,240,x,1,300,31\n"
    assert rows(from_openai(written(tmp_path / "usage.csv", table))) == wanted


def test_openai_buckets_have_the_mean_of_what_was_cached(tmp_path: Path) -> None:
    usage = {"num_model_requests": 3, "input_tokens": 300, "output_tokens": 31}
    for cached, expected in ((None, 0), (0, 0), (100, 33), (300, 99)):
        trace = from_openai(
            written(tmp_path / "usage.json", json.dumps(page({**usage, "input_cached_tokens": cached})))
        )
        assert trace.requests.cached_tokens.tolist() == [expected] * 3
    table = (
        "start_time,end_time,num_model_requests,input_tokens,input_cached_tokens,output_tokens\n60,120,3,300,100,31\n"
    )
    assert from_openai(written(tmp_path / "usage.csv", table)).requests.cached_tokens.tolist() == [33] * 3
    with pytest.raises(FileError, match="input_cached_tokens must be a whole number from 0 to 300"):
        from_openai(written(tmp_path / "wrong.json", json.dumps(page({**usage, "input_cached_tokens": 301}))))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (page({"num_model_requests": 1, "input_tokens": 1}), r"data\[0\].results\[0\]: output_tokens is missing"),
        ([page({"input_tokens": 1})], r"\[0\].data\[0\].results\[0\]: num_model_requests is missing"),
        (page({"num_model_requests": 10**9}), "num_model_requests must be a whole number from 0 to 1,000,000"),
        (page({}, end_time=60), "end_time must be after start_time"),
        ({"data": [{"start_time": 0}]}, r"data\[0\].results: is missing"),
        ({"data": 3}, "data: must be a list"),
    ],
)
def test_faults_of_a_usage_export_are_named(tmp_path: Path, content: Any, problem: str) -> None:
    with pytest.raises(FileError, match=problem):
        from_openai(written(tmp_path / "usage.json", json.dumps(content)))


def test_the_command_writes_what_the_planner_reads(tmp_path: Path) -> None:
    source, out = written(tmp_path / "spend.json", json.dumps(SPENT)), tmp_path / "trace.csv"
    call = ["import-trace", "--from", "litellm", str(source), "--out", str(out), "--json"]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["left_out"] == 1
    trace = read_trace(out)
    assert (trace.arrival_s.tolist(), trace.output_tokens.tolist()) == ([0.0, 2.5], [5, 4])
    bad = CliRunner().invoke(app, [*call[:2], "vllm", *call[3:]])
    assert bad.exit_code == 2
