"""`penstock measure`: over a running mesh of shipped models; what it writes is what planner and calibration read."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.judge_service.calibrate import read_samples
from tests.conftest import FAMILY, MeshRunner
from tests.support.inputs import read_quality
from tests.support.present import present

PROMPTS = [
    {"prompt": "What is 12 + 30?", "answer": "42"},
    {"prompt": "Sort: 7, 3, 9", "answer": "3, 7, 9"},
    {"prompt": "What is 5 + 6?", "answer": "11"},
]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.slow
async def test_every_tier_is_asked_and_scored(run_mesh: MeshRunner, tmp_path: Path) -> None:
    judge = {"scorers": [{"name": "exact", "kind": "exact"}, {"name": "sure", "kind": "confidence"}]}
    tiers = [{"name": t, "model": str(FAMILY / t), "engine": "torch", "threshold": 50} for t in ("small", "medium")]
    del tiers[1]["threshold"]
    prompts, out, labelled = write(tmp_path / "p.jsonl", PROMPTS), tmp_path / "judged.csv", tmp_path / "labelled.jsonl"
    async with run_mesh(tiers, judge=judge | {"default_scorer": "exact"}) as mesh, mesh.client() as client:
        command = ["measure", str(prompts), "--out", str(out), "--labelled", str(labelled), "--max-tokens", "80"]
        command += ["--target", mesh.router.address, "--admin", mesh.router.admin_address, "--json"]
        done = await asyncio.to_thread(CliRunner().invoke, app, command)
        assert done.exit_code == 0, done.output
        replies = [await client.generate(p["prompt"], model="medium", temperature=0, max_tokens=80) for p in PROMPTS]
    sample = read_quality(out, ("small", "medium"))
    assert [int(n) for n in sample.output_tokens[:, 1]] == [r.usage.output_tokens for r in replies]
    assert [int(n) for n in sample.input_tokens] == [r.usage.prompt_tokens for r in replies]
    right = [r.text.rsplit("Answer:", 1)[-1].strip() == p["answer"] for r, p in zip(replies, PROMPTS, strict=True)]
    assert [score == 100 for score in sample.scores[:, 1]] == right
    assert present(sample.known_quality)[:, 1].tolist() == [100 if good else 0 for good in right]
    samples = read_samples(labelled)
    assert [sample.good for sample in samples[len(PROMPTS) :]] == right
    last = samples[-1].answer
    assert (last.answer, last.tier, last.finish_reason.value) == (replies[-1].text, "medium", "stop")
    assert present(last.logprobs).least < present(last.logprobs).mean
    figures = json.loads(done.stdout)
    assert [t["tier"] for t in figures["tiers"]] == ["small", "medium"]
    assert figures["tiers"][1]["right"] == pytest.approx(sum(right) / len(right))


@pytest.mark.parametrize(
    ("rows", "more", "said"),
    [
        ([], [], "no prompts"),
        ([{"question": "x"}], [], ":1: prompt is missing"),
        ([{"prompt": "x"}], ["--labelled", "l.jsonl"], "needs an answer with every prompt"),
        ([{"prompt": "x"}], ["--predictor", "p.json"], "1 distinct prompts; training needs at least 100"),
    ],
)
def test_prompts_that_cannot_be_used_are_named(
    rows: list[dict[str, str]], more: list[str], said: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, ["measure", str(write(tmp_path / "p.jsonl", rows)), *more])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
