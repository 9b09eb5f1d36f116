"""Scorers that check an answer: numbers, JSON schemas, programs in a sandbox, agreement with further samples."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from judge_service.compose import build_scorer
from judge_service.sandbox import Sandbox, SandboxLimits, SandboxUnavailable
from judge_service.scorers import JudgedAnswer, LogprobSummary, Scorer
from judge_service.scorers.code import CodeScorer, program_in
from judge_service.scorers.confidence import ConfidenceScorer
from judge_service.scorers.consistency import ConsistencyScorer, SampleOptions
from judge_service.scorers.exact import ExactScorer
from judge_service.scorers.json_schema import JsonSchemaScorer
from judge_service.tier_client import TierChat
from services.domain import InvalidRequest, SamplingParams, TextPrompt, Unavailable
from services.domain.requests import Prompt
from services.domain.structured import StructuredOutput, StructureKind
from services.mesh_file import load_mesh_file
from services.settings import ServiceSettings
from services.state.keys import Keys
from services.testing import RedisProcess
from tests.conftest import MeshFileMaker
from tests.support.mesh import running_mesh

PROMPT = TextPrompt("p")


async def score(scorer: Scorer, *answers: str, **fields: object) -> list[float]:
    items = [JudgedAnswer(PROMPT, answer, **fields) for answer in answers]  # type: ignore[arg-type]
    return [result.score for result in await scorer.score(items)]


async def test_numbers_may_differ_by_the_tolerance() -> None:
    """And by no more; without one, only by rounding."""
    answers = ("3.14", "about 3.1416", "3.2", "1e308")
    assert await score(ExactScorer("number", 0.01), *answers, reference="3.1415926") == [100, 100, 0, 0]
    assert await score(ExactScorer("number"), *answers, reference="3.1415926") == [0, 0, 0, 0]


async def test_confidence_may_be_that_of_the_least_likely_token() -> None:
    """One wrong step among many sure ones."""
    summary = LogprobSummary(10, -0.1, -3.0)
    item = JudgedAnswer(PROMPT, "x", logprobs=summary)
    (mean,), (least,) = await ConfidenceScorer("mean").score([item]), await ConfidenceScorer("min").score([item])
    assert (mean.raw, least.raw) == (-0.1, -3.0)
    bad = JudgedAnswer(PROMPT, "x", logprobs=LogprobSummary(1, -0.1, float("nan")))
    with pytest.raises(InvalidRequest, match="min_logprob"):
        await ConfidenceScorer("min").score([bad])


async def test_a_schema_comes_from_the_file_or_the_request(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object", "required": ["total"], "properties": {"total": {"minimum": 0}}}')
    scorer = JsonSchemaScorer(file)
    await scorer.start()
    assert await score(scorer, '{"total": 1}', '{"total": -1}', "{", "[" * 10_000) == [100, 0, 0, 0]
    form = StructuredOutput(StructureKind.JSON_SCHEMA, '{"type": "integer"}')
    assert await score(JsonSchemaScorer(None), "7", '"7"', structured_output=form) == [100, 0]
    with pytest.raises(InvalidRequest, match=r"items\[0\].structured_output"):
        await score(JsonSchemaScorer(None), "7")
    file.write_text("[]")
    with pytest.raises(ValueError, match="must be a JSON object"):
        await JsonSchemaScorer(file).start()


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```\n```py\nlonger = 2\n```", "longer = 2\n"),
        ("```sh\npip install everything there is\n```\n```Python3\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),
    ],
)
def test_the_program_of_an_answer_is_its_longest_block(answer: str, program: str) -> None:
    assert program_in(answer) == program


def sandbox_works() -> bool:
    """Whether bubblewrap is installed and may create namespaces here."""
    probe = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    return shutil.which("bwrap") is not None and subprocess.run(probe, capture_output=True, check=False).returncode == 0


needs_sandbox = pytest.mark.skipif(not sandbox_works(), reason="bubblewrap is not installed or may not run here")
FLOOD = (
    "import os\nfor fd in range(3, 9):\n    try:\n        os.write(fd, b'x' * 10**4)\n    except OSError:\n        pass"
)
SILENT_LOOP = "import os\nos.close(3)\nwhile True: pass"
ADD = "def add(a, b):\n    return a + b\n"
PROGRAMS = {
    "right": (ADD, True),
    "wrong": (ADD.replace("+", "-"), False),
    "no program": ("I would add the numbers.", False),
    "exits": ("import os\nos._exit(0)", False),
    "exits politely": (ADD + "raise SystemExit(0)", False),
    "prints": (ADD + "print('x' * 10**6)", True),
    "writes to its pipes": (ADD + FLOOD, False),
    "has a /tmp": (ADD + "open('/tmp/x', 'w').write('x')\nassert open('/tmp/x').read() == 'x'", True),
    "fills the disk": (ADD + "open('/tmp/x', 'w').write('x' * 2**25)", False),
    "fills the memory": (ADD + "x = bytearray(2**30)", False),
    "reads a file": (ADD + "open('/etc/passwd').read()", False),
    "reads this project": (ADD + f"open({str(Path(__file__))!r}).read()", False),
    "writes a file": (ADD + "open('/usr/x', 'w')", False),
    "has a network": (ADD + "import socket\nassert len(socket.if_nameindex()) > 1", False),
    "sees others": (ADD + "import os\nassert any(int(p) > 9 for p in os.listdir('/proc') if p.isdigit())", False),
    "sees the environment": (ADD + "import os\nassert 'SECRET' in os.environ", False),
    "is root": (ADD + "import os\nos.setuid(0)", False),
}


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")


@needs_sandbox
@pytest.mark.parametrize("name", PROGRAMS)
async def test_programs_are_run_without_rights(name: str, secret: None) -> None:
    """Only a program that passes its tests scores; what it may not do fails, and what it may do works."""
    program, passes = PROGRAMS[name]
    scorer = CodeScorer(Sandbox(SandboxLimits(wall_s=60)), concurrency=2)
    await scorer.start()
    answer = f"```python\n{program}\n```"
    assert await score(scorer, answer, reference="assert add(2, 3) == 5") == [100 if passes else 0]


@needs_sandbox
@pytest.mark.skipif(os.geteuid() == 0, reason="the kernel does not limit the processes of root")
async def test_a_program_cannot_start_many_processes() -> None:
    fork = "import os\nfor _ in range(64):\n    if not os.fork():\n        import time; time.sleep(60)"
    assert not await Sandbox(SandboxLimits(wall_s=60)).passes(fork, "")


@needs_sandbox
@pytest.mark.parametrize(
    "program", ["while True: pass", "import time; time.sleep(600)", "import os; os.close(3)\nwhile True: pass"]
)
async def test_a_program_that_does_not_end_fails(program: str) -> None:
    async with asyncio.timeout(60):
        assert not await Sandbox(SandboxLimits(wall_s=1)).passes(program, "")


async def test_without_bubblewrap_the_scorer_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code is never run without it."""
    monkeypatch.setenv("PATH", "/nowhere")
    scorer = CodeScorer(Sandbox(SandboxLimits(1)), concurrency=1)
    with pytest.raises(ValueError, match="install bubblewrap"):
        await scorer.start()
    with pytest.raises(Unavailable, match="sandbox"):
        await score(scorer, "x = 1", reference="")


async def test_a_sandbox_that_cannot_start_is_not_a_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where namespaces are forbidden: bwrap says so and ends."""
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(SandboxUnavailable, match="No permissions"):
        await Sandbox(SandboxLimits(60)).passes("", "")


class Sampler:
    """Draws answers from a list, by seed."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.requests = answers, list[tuple[str, SamplingParams]]()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def sample(self, tier: str, prompt: Prompt, sampling: SamplingParams) -> str:
        self.requests.append((tier, sampling))
        assert sampling.seed is not None
        return self.answers[sampling.seed % len(self.answers)]


async def test_consistency_is_the_share_of_samples_that_agree() -> None:
    """By their final answers; the samples are of the tier that answered, and the same for the same answer."""
    sampler = Sampler("Answer: 4", "2+2=5\nAnswer: 5", "so\nAnswer: 4", "none")
    scorer = ConsistencyScorer(sampler, SampleOptions("", 4, 0.7, 32, "final-answer"), concurrency=2)
    assert await score(scorer, "Answer: 4", "Answer: 5", "Answer: 6", tier="small") == [50, 25, 0]
    assert {tier for tier, _ in sampler.requests} == {"small"}
    assert all(s.temperature == 0.7 and s.max_output_tokens == 32 for _, s in sampler.requests)
    assert await score(scorer, "Answer: 4", tier="small") == [50]
    fixed = ConsistencyScorer(sampler, SampleOptions("large", 4, 0.7, 32, "number"), concurrency=2)
    await score(fixed, "4", tier="small")
    assert sampler.requests[-1][0] == "large"


async def test_samples_are_drawn_from_the_tiers_of_the_mesh(redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    """The samples of a deterministic tier are its own answer, so it is wholly consistent; another answer is not."""
    scorer = {
        "name": "consistency",
        "kind": "consistency",
        "samples": 3,
        "compare": "text",
        "max_tokens": 8,
        "timeout_s": 60,
    }
    router = {"grpc_port": 0, "http_port": 0, "judge_timeout_s": 60}
    file = mesh_file(judge={"scorers": [scorer]}, router=router)
    async with running_mesh(file, redis.url):
        mesh = load_mesh_file(file)
        built = build_scorer(mesh.judge.scorers[0], mesh, ServiceSettings.load(redis_url=redis.url))
        await built.start()
        try:
            chat = TierChat("", redis.url, Keys(mesh.name), timeout_s=60)
            await chat.start()
            answer = await chat.sample("small", PROMPT, SamplingParams(temperature=0.7, seed=1, max_output_tokens=8))
            await chat.close()
            (result,) = await built.score([JudgedAnswer(PROMPT, answer, tier="small")])
            (other,) = await built.score([JudgedAnswer(PROMPT, answer + "?", tier="small")])
        finally:
            await built.close()
    assert result.raw >= 1 / 3
    assert other.raw == 0
