"""Scorers that check an answer: numbers, JSON schemas, programs in a sandbox, agreement with further samples."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.judge_service.clients.tier_client import TierChat
from penstock.judge_service.compose import read_options
from penstock.judge_service.scorers.code.examples import code_in, examples_in
from penstock.judge_service.scorers.code.extension import CodeScorer, program_in
from penstock.judge_service.scorers.code.sandbox.bubblewrap import Sandbox, SandboxUnavailable
from penstock.judge_service.scorers.confidence import ConfidenceScorer
from penstock.judge_service.scorers.consistency import Consistency, ConsistencyScorer
from penstock.judge_service.scorers.exact import ExactScorer
from penstock.judge_service.scorers.json_schema import JsonSchemaScorer
from penstock.judge_service.scoring.extension import ScorerSite
from penstock.judge_service.scoring.interface import Scorer
from penstock.services.domain.errors import InvalidRequest, Unavailable
from penstock.services.mesh_file import load_mesh_file
from penstock.services.settings import ServiceSettings
from penstock.services.state.keys import Keys
from penstock.types.judging import JudgedAnswer, LogprobSummary
from penstock.types.prompts import ChatMessage, ChatPrompt, Prompt, TextPrompt
from penstock.types.sampling import SamplingParams
from penstock.types.structured import StructuredOutput
from tests.conftest import MeshFileMaker
from tests.support.mesh import running_mesh
from tests.support.services import RedisProcess

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
    form = StructuredOutput(json_schema='{"type": "integer"}')
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
    scorer = CodeScorer(Sandbox(60), concurrency=2)
    await scorer.start()
    answer = f"```python\n{program}\n```"
    assert await score(scorer, answer, reference="assert add(2, 3) == 5") == [100 if passes else 0]


@needs_sandbox
@pytest.mark.skipif(os.geteuid() == 0, reason="the kernel does not limit the processes of root")
async def test_a_program_cannot_start_many_processes() -> None:
    fork = "import os\nfor _ in range(64):\n    if not os.fork():\n        import time; time.sleep(60)"
    assert not await Sandbox(60).passed(fork, [""])


@needs_sandbox
@pytest.mark.parametrize(
    "program", ["while True: pass", "import time; time.sleep(600)", "import os; os.close(3)\nwhile True: pass"]
)
async def test_a_program_that_does_not_end_fails(program: str) -> None:
    async with asyncio.timeout(60):
        assert not await Sandbox(1).passed(program, [""])


async def test_without_bubblewrap_the_scorer_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code is never run without it; where the sandbox is optional, nothing is known of programs."""
    monkeypatch.setenv("PATH", "/nowhere")
    optional = CodeScorer(Sandbox(1), concurrency=1, from_prompt=True, optional=True)
    await optional.start()
    assert [result.raw for result in await optional.score([JudgedAnswer(TextPrompt("f(1) == 1"), "f = abs")])] == [0.5]
    scorer = CodeScorer(Sandbox(1), concurrency=1)
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
        await Sandbox(60).passed("", [""])


TASKS = {
    'from typing import List\n\ndef double(x: List[int]):\n    """\n    >>> double([1])\n    [2]\n    >>> len([1])\n    3': 1,
    "Write half.\nhalf(3) == 1.5, half(0) ==> 0 # none\nhalf(4) -> 1 + 1; half(x) = 4. `half(4)` should return 2.": 3,
    'def add(a, b):\n    """Input: a = 1, b = 2\n    Output: 3\n\n    For a = 2, b = 3 the output should be 5.': 2,
    "Is f(x) = 3 a function? print(3) == 3 and import os; os.remove('x') == 1": 0,
}


@pytest.mark.parametrize("prompt", TASKS)
def test_the_examples_of_a_task_are_those_with_literal_arguments_and_values(prompt: str) -> None:
    assert len(examples_in(prompt)) == TASKS[prompt]


@pytest.mark.parametrize(
    "prompt",
    [
        "f(" * 100_000,
        ("f(1) = 1 " * 40 + "\n") * 2_000,
        "def f(x):\nFor x" + " \n" * 400_000,
        ("f(1) == " + ". , ; ) " * 48 + "\n") * 2_000,
        "```\nx=\n" * 100_000,
    ],
    ids=["nested", "calls", "blank lines", "ends", "fences"],
)
@pytest.mark.timeout(30)
def test_the_examples_of_a_hostile_prompt_are_read_in_bounded_time(prompt: str) -> None:
    """Without its bounds, each takes minutes."""
    assert len(examples_in(prompt)) <= 1
    code_in(prompt)


@needs_sandbox
async def test_programs_are_run_with_the_examples_of_the_prompt() -> None:
    """What the code of the task begins may be missing in the answer. Without examples or a program, nothing is known."""
    scorer = CodeScorer(Sandbox(60), concurrency=2, from_prompt=True)
    task = 'Do it:\n```python\nimport math\n\ndef area(r):\n    """\n    >>> area(1)\n    3.141592653\n    """\n```'
    answers = ("def area(r):\n    return math.pi * r * r", "def area(r):\n    return r", "I cannot.")
    shown, silent = (
        [JudgedAnswer(ChatPrompt((ChatMessage("user", text),)), answer) for answer in answers] for text in (task, "Hi")
    )
    assert [result.raw for result in await scorer.score([*shown, silent[0]])] == [1, 0, 0.5, 0.5]


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
    scorer = ConsistencyScorer(sampler, Consistency(samples=4, max_tokens=32, concurrency=2))
    assert await score(scorer, "Answer: 4", "Answer: 5", "Answer: 6", tier="small") == [50, 25, 0]
    assert {tier for tier, _ in sampler.requests} == {"small"}
    assert all(s.temperature == 0.7 and s.max_tokens == 32 for _, s in sampler.requests)
    assert await score(scorer, "Answer: 4", tier="small") == [50]
    fixed = ConsistencyScorer(
        sampler, Consistency(tier="large", samples=4, max_tokens=32, compare="number", concurrency=2)
    )
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
        site = ScorerSite(mesh, mesh.judge.scorers[0], ServiceSettings.load(redis_url=redis.url), {})
        built = read_options(mesh, site.scorer).build(site)
        await built.start()
        try:
            chat = TierChat("", redis.url, Keys(mesh.name), timeout_s=60)
            await chat.start()
            answer = await chat.sample("small", PROMPT, SamplingParams(temperature=0.7, seed=1, max_tokens=8))
            await chat.close()
            (result,) = await built.score([JudgedAnswer(PROMPT, answer, tier="small")])
            (other,) = await built.score([JudgedAnswer(PROMPT, answer + "?", tier="small")])
        finally:
            await built.close()
    assert result.raw >= 1 / 3
    assert other.raw == 0
