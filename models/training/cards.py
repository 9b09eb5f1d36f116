"""Model cards from the figures of a training, and the installation of its models as the shipped family."""

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from models.training import judge
from models.training.measure import CONFIDENCE, FIT_COUNT, PREDICTOR, SLACK, TEST_COUNT, TEST_SEED, TIERS
from models.training.problems import HELD_OUT_SHARE
from models.training.tasks import TASKS
from models.training.train import PROGRESS
from models.training.wording import HELD_OUT_SHARE as WORDING_SHARE

PLAIN = "as they are"
CALIBRATIONS = ("calibration.json", CONFIDENCE.name)


def install(work: Path, family: Path) -> None:
    """Replace the models in `family` by those of `work`, with figures and cards. The held-out prompts are written next to the folder.

    Raises:
        FileNotFoundError: The work folder lacks a model or its figures; nothing has been replaced.
    """
    figures = json.loads((work / "figures.json").read_text())
    names = (*TIERS, "judge")
    for name in names:
        for file in ("model.safetensors", "config.json", "tokenizer.json"):
            if not (work / name / file).exists():
                raise FileNotFoundError(work / name / file)
    for name in names:
        shutil.rmtree(family / name, ignore_errors=True)
        shutil.copytree(work / name, family / name, ignore=shutil.ignore_patterns("progress.json"))
    shutil.copy(work / PREDICTOR, family / PREDICTOR)
    (family / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    shutil.copy(work / "heldout.jsonl", family.parent / "heldout.jsonl")
    for tier in TIERS:
        (family / tier / "README.md").write_text(tier_card(tier, figures, family / tier))
    (family / "judge" / "README.md").write_text(judge_card(figures, family / "judge"))
    (family / "README.md").write_text(family_card(figures, family))


def take_up(family: Path, work: Path, unfinished: Collection[str] = ()) -> None:
    """Begin a training with the installed models. unfinished: tiers that are trained on from their weights.

    Raises:
        FileExistsError: The work folder has a model already.
    """
    figures = json.loads((family / "figures.json").read_text())
    models = {tier: (family / tier, figures["tiers"][tier]["training"]) for tier in TIERS}
    models[judge.BASE] = (family / "judge", figures["judge"]["training"])
    for name, (installed, training) in models.items():
        shutil.copytree(installed, work / name, ignore=shutil.ignore_patterns("README.md", *CALIBRATIONS))
        place = work / name / PROGRESS if name in unfinished else work / f"{name}.figures.json"
        place.write_text(json.dumps(training, indent=1) + "\n")


def tier_card(tier: str, figures: dict[str, Any], folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    own_figures, training = figures["tiers"][tier], figures["tiers"][tier]["training"]
    levels = "\n".join(f"| {level} | {percent(value)} |" for level, value in own_figures["by_level"].items())
    by_task = "\n".join(f"| {task} | {percent(value)} |" for task, value in own_figures["by_task"].items())
    rows = "\n".join(f"| {name} | {percent(row['accuracy'][tier])} |" for name, row in figures["rows"].items())
    lengths = own_figures["reply_tokens"]
    return f"""# Penstock {tier}

A Llama of {training["parameters"] / 1e6:.2f} M parameters ({config["num_hidden_layers"]} layers of {config["hidden_size"]}, \
{config["num_attention_heads"]} heads, {config["num_key_value_heads"]} for keys and values), byte tokenizer, context of \
{config["max_position_embeddings"]} tokens, {size_mb(folder):.2f} MB. It solves small tasks with numbers, words, lists and tables that have checkable answers, and
nothing else: it knows no facts.

**Accuracy on {TEST_COUNT} held-out prompts: {percent(own_figures["accuracy"])}** (greedy, final answer compared with the known one). A decode step at
batch 8 takes {figures["step_cost_ms"][tier]:.2f} ms of one CPU thread.

| the same problems | accuracy |
|---|---|
{rows}

| level | accuracy |
|---|---|
{levels}

| task | accuracy |
|---|---|
{by_task}

Replies: {lengths["p50"]} tokens at the median, {lengths["p95"]} at p95, {lengths["most"]} at most.

Training: {training["training_tokens"] / 1e6:.0f} M tokens of generated problems (`models/training`), none of them held out, begun with
`{training["recipe"]["grows_from"]}`; {training["steps"]} steps, {training["cpu_s"]} CPU seconds in {training["threads"]} threads; seed {training["recipe"]["seed"]}. Weights are stored in bfloat16 and
computed in float32. Licence: Apache-2.0.
"""


def judge_card(figures: dict[str, Any], folder: Path) -> str:
    own_figures, training = figures["judge"], figures["judge"]["training"]
    aucs = "\n".join(
        f"| {name} | {row['auc']['small']:.3f} | {row['auc']['medium']:.3f} |" for name, row in figures["rows"].items()
    )
    shares = "\n".join(
        f"| {percent(float(share))} | {value:.3f} | {own_figures['medium']['auc_by_share_read'][share]:.3f} |"
        for share, value in own_figures["small"]["auc_by_share_read"].items()
    )
    bias = "\n".join(
        f"| {name} | "
        + " | ".join(
            f"{own_figures[t]['auc_by_length'][name]:.3f}" if name in own_figures[t]["auc_by_length"] else "-"
            for t in TIERS[:2]
        )
        + " |"
        for name in ("short", "middle", "long", "length alone")
    )
    plot = "\n\n".join(
        f"{tier}:\n\n```\n{reliability_plot(own_figures[tier]['reliability'])}\n```" for tier in TIERS[:2]
    )
    return f"""# Penstock judge

Scores (prompt, answer) without knowing the truth: a Llama of {training["parameters"] / 1e6:.2f} M parameters, {size_mb(folder):.2f} MB: the trunk out of which the large tier grew, without
lessons in judging. It judges an answer by the log-probability of its least likely token, the end included. AUC on the answers to {TEST_COUNT} held-out prompts:

| the same problems | small | medium |
|---|---|---|
{aucs}

| share of the answer read | small | medium |
|---|---|---|
{shares}

| replies by length, in thirds | small | medium |
|---|---|---|
{bias}

`calibration.json` maps its log-probability to 0-100: fitted on the answers to {FIT_COUNT} other held-out prompts with surface noise. On the test prompts the Brier
score is {own_figures["small"]["brier"]:.3f} (small) and {own_figures["medium"]["brier"]:.3f} (medium). How many answers of each tenth of the scale are right:

{plot}

Training: {training["training_tokens"] / 1e6:.0f} M tokens of generated problems after those of the medium tier; {training["steps"]} steps, {training["cpu_s"]} CPU seconds in {training["threads"]} threads; seed
{training["recipe"]["seed"]}. Licence: Apache-2.0.
"""


def reliability_plot(rows: list[dict[str, float]]) -> str:
    """One line for each tenth that holds answers: a bar of the share that is right, `|` at the mean score."""
    lines = []
    for row in rows:
        bar = list("#" * round(row["right"] / 2.5) + " " * (40 - round(row["right"] / 2.5)))
        bar[min(39, round(row["mean_score"] / 2.5))] = "|"
        lines.append(f"{row['from']:3.0f}+ {''.join(bar)} {row['right']:5.1f} % right of {row['answers']}")
    return "\n".join(lines)


def family_card(figures: dict[str, Any], family: Path) -> str:
    costs, least = figures["step_cost_ms"], min(figures["step_cost_ms"].values())
    tiers = "\n".join(
        f"| [{tier}]({tier}/README.md) | {tier_figures['training']['parameters'] / 1e6:.2f} M | {size_mb(family / tier):.2f} MB | {costs[tier]:.2f} ms "
        f"({costs[tier] / least:.1f}) | {percent(tier_figures['accuracy'])} | {tier_figures['training']['cpu_s'] / 3600:.1f} h |"
        for tier, tier_figures in figures["tiers"].items()
    )
    rows = "\n".join(
        f"| {name} | {percent(row['accuracy']['large'])} | {percent(row['cascade']['accuracy'])} | {percent(row['cascade']['wrong_among_accepted'])} "
        f"| {percent(row['cascade']['cost_of_large_alone'])} |"
        for name, row in figures["rows"].items()
    )
    shares = ", ".join(
        f"{tier} {percent(share)}" for tier, share in figures["rows"][PLAIN]["cascade"]["share_answered"].items()
    )
    thresholds = ", ".join(f"{tier} {value:.0f}" for tier, value in figures["thresholds"].items())
    limits = ", ".join(f"{tier} {value:.0f}" for tier, value in figures["skip_below"].items())
    own = figures["rows"][PLAIN]["cascade"]
    asked = " and ".join(
        f"{percent(share)} of {tier}'s" for tier, share in figures["rows"][PLAIN]["read_by_the_judge"].items()
    )
    margins = "\n".join(
        f"| {margin} | {percent(found['accuracy'])} | {percent(found['cost_of_large_alone'])} |"
        for margin, found in figures["margins"].items()
    )
    return f"""# The shipped family

Three Llamas and a judge, small enough to be shipped and to run anywhere, good enough that a cascade of them is a real one: each tier costs several times the
one below and is really better, and the judge tells good answers from bad. They know only small tasks with numbers, words, lists and tables.

| tier | parameters | size | decode step at batch 8, one thread (ratio) | accuracy on {TEST_COUNT} held-out prompts | training, CPU time |
|---|---|---|---|---|---|
{tiers}

As a cascade whose thresholds ({thresholds}) and limits of skip prediction ({limits}) were chosen on other prompts for the least CPU time within {SLACK:.0%} of the large tier's accuracy, answered by {shares}:

| the same problems | large alone | cascade | wrong among accepted | CPU time, of large alone |
|---|---|---|---|---|
{rows}

The CPU time is computed from the tokens and the costs below: decode steps of batch 8, prompts and judged answers read once. The score of an answer is the calibrated log-probability of its least likely token (`judge/confidence.json`) where that is sure, at most
{figures["margin"]:g} or at least {100 - figures["margin"]:g}; else the judge reads the answer, which it does with {asked}. The best rule with other margins, on the {FIT_COUNT} prompts that thresholds, limits and margin were chosen on:

| margin | accuracy | CPU time, of large alone |
|---|---|---|
{margins}

`predictor.json` expects each tier's score from the prompt (trained on {figures["predictor"]["prompts"]:,} training prompts);
passing tiers over reduces the tokens of answers that do not stand from {own["without_skipping"]["tokens_in_vain"]:.1f} to {own["tokens_in_vain"]:.1f} per prompt. A token read costs {", ".join(f"{name} {1000 * value:.0f} us" for name, value in figures["read_cost_ms"].items())}.

The tasks ({len(TASKS)} of them, five levels each): {", ".join(TASKS)}. A problem is held out by a checksum of its content whatever its wording and whatever the order of
operands that commute, one in {HELD_OUT_SHARE}; a wording by a checksum of its text, one in {WORDING_SHARE}. The test prompts (seed {TEST_SEED}) are in `../heldout.jsonl`.

figures.json has every figure, measured on {figures["machine"]}; `models/training/README.md` says how they were made.
"""


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def size_mb(folder: Path) -> float:
    """Size of the weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6
