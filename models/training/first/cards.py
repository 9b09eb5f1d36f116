"""Model cards from the measured figures."""

import json
from pathlib import Path
from typing import Any

from models.training.first.measure import FIT_COUNT, TEST_COUNT, TEST_SEED, TIERS
from models.training.first.tasks import HELD_OUT_SHARE, TASKS


def write_cards(family: Path) -> None:
    """Write README.md for the family and for each model, from figures.json."""
    figures = json.loads((family / "figures.json").read_text())
    for tier in TIERS:
        (family / tier / "README.md").write_text(tier_card(tier, figures["tiers"][tier], family / tier))
    (family / "judge" / "README.md").write_text(judge_card(figures["judge"], family / "judge"))
    (family / "README.md").write_text(family_card(figures, family))


def tier_card(tier: str, figures: dict[str, Any], folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    training = figures["training"]
    lengths = figures["reply_tokens"]
    levels = " | ".join(f"{100 * figures['by_level'][str(level)]:.0f} %" for level in range(1, 6))
    rows = "\n".join(f"| {task} | {100 * value:.0f} % |" for task, value in figures["by_task"].items())
    return f"""# Penstock {tier}

A Llama of {training["parameters"] / 1e6:.2f} M parameters ({config["num_hidden_layers"]} layers of {config["hidden_size"]},
{config["num_attention_heads"]} heads, {config["num_key_value_heads"]} for keys and values), byte tokenizer, context of
{config["max_position_embeddings"]} tokens, {size_mb(folder):.2f} MB. It solves small tasks with checkable answers and nothing else; it
knows no facts and must not be asked for any.

**Accuracy on {TEST_COUNT} held-out prompts: {100 * figures["accuracy"]:.1f} %** (greedy, final answer compared with the known one).

| level 1 | 2 | 3 | 4 | 5 |
|---|---|---|---|---|
| {levels} |

Replies: {lengths["p50"]} tokens at the median, {lengths["p95"]} at p95, {lengths["most"]} at most.

| task | accuracy |
|---|---|
{rows}

Training: {training["training_tokens"] / 1e6:.0f} M tokens of generated problems (`models/training/tasks.py`), none of them held out,
{begun(training)}; {training["steps"]} steps in {training["training_seconds"] / 3600:.1f} h with {training["threads"]} CPU threads; seed {training["recipe"]["seed"]}. Weights are stored in bfloat16
and computed in float32.{note(training)} Licence: Apache-2.0.
"""


def begun(training: dict[str, Any]) -> str:
    """The origin of the weights."""
    tier = training["recipe"]["grows_from"]
    return f"begun with the {tier} tier's trunk, grown (`models/training/growth.py`)" if tier else "from random weights"


def hours(training: dict[str, Any]) -> str:
    return "see its card" if "note" in training else f"{training['training_seconds'] / 3600:.1f} h"


def note(training: dict[str, Any]) -> str:
    """A note about this training from its figures."""
    return f" {training['note']}" if "note" in training else ""


def judge_card(figures: dict[str, Any], folder: Path) -> str:
    training = figures["training"]
    auc = figures["auc"]
    return f"""# Penstock judge

Scores (prompt, answer) without knowing the truth: a Llama of {training["parameters"] / 1e6:.2f} M parameters, {size_mb(folder):.2f} MB, begun from the
large tier's weights. It judges an answer by the log-probability of its least likely token.

**AUC on the answers to {TEST_COUNT} held-out prompts: {auc["small"]:.3f} for the small tier's, {auc["medium"]:.3f} for the medium tier's.**

Trained on {training["samples"]:,} answers, most of them the three tiers' own to training problems, of which {100 * training["right_share"]:.0f} % are right; empty, cut,
overlong and misplaced answers and answers to smalltalk are among the others. What agrees with the
right reply becomes likelier, the first token that does not less likely; {training["steps"]} steps in {training["training_seconds"] / 60:.0f} minutes with {training["threads"]} CPU
threads; seed {training["seed"]}. `calibration.json` maps its log-probability to 0-100: fitted on the answers to {FIT_COUNT} other held-out prompts,
Brier score {figures["calibration"]["brier"]:.3f}. Licence: Apache-2.0.
"""


def family_card(figures: dict[str, Any], family: Path) -> str:
    rows = "\n".join(
        f"| [{tier}]({tier}/README.md) | {t['training']['parameters'] / 1e6:.2f} M | {size_mb(family / tier):.2f} MB "
        f"| {100 * t['accuracy']:.1f} % | {hours(t['training'])} |"
        for tier, t in figures["tiers"].items()
    )
    cascade = figures["cascade"]
    shares = ", ".join(f"{tier} {100 * share:.0f} %" for tier, share in cascade["share_answered"].items())
    thresholds = ", ".join(f"{tier} {value:.0f}" for tier, value in cascade["thresholds"].items())
    return f"""# The shipped family

Three Llamas and a judge, small enough to be shipped and to run anywhere, good enough that a cascade of them is a real
one: each tier is really better than the one below, and the judge really tells good answers from bad.

| tier | parameters | size | accuracy on {TEST_COUNT} held-out prompts | training, 2 cores |
|---|---|---|---|---|
{rows}

As a cascade under thresholds chosen on other prompts ({thresholds}): **{100 * cascade["accuracy"]:.1f} %**, answered by {shares}.

The tasks ({len(TASKS)} of them, five levels each): {", ".join(TASKS)}. Longer ones show their working. A problem is held out by a
checksum of its content whatever its wording, one in {HELD_OUT_SHARE}; the test prompts (seed {TEST_SEED}) are in `../heldout.jsonl`.

`predictor.json` expects the score of small's and medium's answer from the prompt alone (3,882 training prompts; AUC 0.84 and 0.86 on those held out); the shipped mesh passes a tier over where it expects
less than 50. `make demo` shows what that saves.

Made by `make models` (hours on two cores); figures.json has every figure, measured on {figures["machine"]}.
"""


def size_mb(folder: Path) -> float:
    """Size of the weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6
