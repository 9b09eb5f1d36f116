"""`penstock predictor`: train the score predictor of routers on what `penstock measure` has measured, or predict with one."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options, targets
from penstock.cli.held_out import read_questions
from penstock.cli.output import console, fail, failing_on, needs_extra, print_json, print_written, table_of
from penstock.types.ranges import SCORE

if TYPE_CHECKING:
    from penstock.planner_service.question.score_predictor import Trained
    from penstock.planner_service.simulator.workload import Floats

COLUMN = "_judge_score"


@needs_extra("predictor", "planner")
def predictor(
    context: typer.Context,
    prompts: Annotated[Path, typer.Argument(help="The JSONL file of prompts that `penstock measure` was given.")],
    quality: Annotated[
        Path, typer.Argument(help="The quality file that it wrote: a row for each prompt, in their order.")
    ],
    out: Annotated[Path, options.new_file("The file to write, for router.score_predictor.")] = Path("predictor.json"),
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Do not train: write the predictions of this predictor, trained on other prompts, to --quality-out.",
        ),
    ] = None,
    quality_out: Annotated[
        Path | None,
        options.new_file(
            "Also write the quality file with a column of predicted scores for each tier, for plans with `rules.skip`."
        ),
    ] = None,
    seed: options.SelectionSeed = 1,
    json: targets.Json = False,
) -> None:
    """Train a model that predicts from a prompt the score of each tier's answer, or let an existing one predict (--from)."""
    if source is not None and quality_out is None:
        fail("--from: needs --quality-out, the file to write", 2)
    for option in ("out", "seed"):
        given = context.get_parameter_source(option)
        if source is not None and given is not None and given.name == "COMMANDLINE":
            fail(f"--{option}: is of training, and --from does not train", 2)
    from penstock.planner_service.question.score_predictor import train
    from penstock.question_files.csv_files import csv_rows, number_of
    from penstock.question_files.errors import FileError
    from penstock.services.domain.errors import InvalidRequest
    from penstock.services.domain.score_prediction import PredictorError

    with failing_on(FileError, InvalidRequest, PredictorError, status=2):
        texts = [question.text for question in read_questions(prompts)]
        rows = [*csv_rows(quality, ())]
        tiers = [name.removesuffix(COLUMN) for name in rows[0][1] if name and name.endswith(COLUMN)]
        if not tiers:
            fail(f"{quality}: line 1: no column {{tier}}{COLUMN}", 2)
        if len(rows) != len(texts):
            fail(f"{quality}: {len(rows)} rows, but {prompts} has {len(texts)} prompts", 2)
        import numpy as np

        scores = np.array([[number_of(at, row, t + COLUMN, SCORE) for t in tiers] for at, row in rows])
        if source is not None:
            assert quality_out is not None
            _write(quality_out, [row for _, row in rows], tiers, _predictions(source, texts, tiers))
            if json:
                print_json({"prompts": len(texts), "out": str(quality_out)})
            else:
                print_written(quality_out)
            return
        trained = train(texts, tiers, scores, seed=seed)
    out.write_text(trained.predictor.to_json())
    if quality_out is not None:
        _write(quality_out, [row for _, row in rows], tiers, trained.predicted.tolist())
    figures = figures_of(trained, scores)
    if json:
        print_json({"prompts": len(texts), "out": str(out), "tiers": figures})
        return
    show_trained(len(texts), figures)
    print_written(out, quality_out)


def figures_of(trained: "Trained", scores: "Floats") -> list[dict[str, Any]]:
    """By tier, how well a predictor predicts prompts that were held out. scores (N, C): of those it was trained on."""
    return [
        {"tier": tier, "mean_score": float(scores[:, t].mean()), "auc": trained.predictor.auc[t]}
        | {"log_loss": trained.log_loss[t], "log_loss_of_the_mean": trained.constant_loss[t]}
        | {"calibration_error": trained.calibration_error[t]}
        for t, tier in enumerate(trained.predictor.tiers)
    ]


def show_trained(prompts: int, figures: list[dict[str, Any]]) -> None:
    """Print the table of `figures_of`."""
    title = f"{prompts} prompts, predictions of those held out"
    table = table_of("tier", "mean score", "AUC", "log loss", "of the mean", "ECE", title=title)
    for row in figures:
        losses = f"{row['log_loss']:.3f}", f"{row['log_loss_of_the_mean']:.3f}"
        errors = f"{row['calibration_error']:.1f}"
        table.add_row(str(row["tier"]), f"{row['mean_score']:.1f}", f"{row['auc']:.3f}", *losses, errors)
    console.print(table)


def _predictions(source: Path, texts: list[str], tiers: list[str]) -> list[list[float]]:
    """Scores by prompt and tier. The last tier, which no router passes over, need not have predictions: 100."""
    from penstock.services.score_predictor_file import read_score_predictor

    predictor = read_score_predictor(source)
    if missing := [tier for tier in tiers[:-1] if tier not in predictor.tiers]:
        fail(f"--from: {source} predicts scores of {', '.join(predictor.tiers)}, not of {', '.join(missing)}", 2)
    predicted = [predictor.predict(text) for text in texts]
    return [[row.get(tier, 100.0) for tier in tiers] for row in predicted]


def _write(path: Path, rows: list[dict[str, str]], tiers: list[str], predicted: list[list[float]]) -> None:
    """The rows with a column of predicted scores for each tier."""
    with path.open("w", newline="") as file:
        names = [f"{tier}_predicted_score" for tier in tiers]
        writer = csv.DictWriter(file, [*(name for name in rows[0] if name not in names), *names])
        writer.writeheader()
        for row, scores in zip(rows, predicted, strict=True):
            writer.writerow({**row, **{name: f"{score:.4g}" for name, score in zip(names, scores, strict=True)}})
