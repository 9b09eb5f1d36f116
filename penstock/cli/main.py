"""The `penstock` command."""

import os
from pathlib import Path
from typing import Annotated

import typer

import penstock
from penstock.cli import (
    ask,
    certs,
    check,
    demo,
    keys,
    local,
    measure,
    plan,
    predictor,
    profile,
    redis_users,
    simulate,
    stages,
    targets,
    top,
    trace,
    trace_files,
    usage,
    values,
)

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Serve a cascade of language models on hardware you own."
)
app.command("up")(local.up)
app.command("down")(local.down)
app.command("check")(check.check)
app.command("status")(top.status)
app.command("top")(top.top)
app.command("ask")(ask.ask)
app.command("chat")(ask.chat)
app.command("trace")(trace.trace)
app.command("demo")(demo.demo)
app.command("simulate")(simulate.simulate)
app.command("profile")(profile.profile)
app.command("stages")(stages.stages)
app.command("export-trace")(trace_files.export_trace)
app.command("import-trace")(trace_files.import_trace)
app.command("measure")(measure.measure)
app.command("predictor")(predictor.predictor)
app.command("usage")(usage.usage)
app.command("redis-users")(redis_users.redis_users)
app.command("values")(values.values)
app.add_typer(plan.app, name="plan")
app.add_typer(keys.app, name="keys")
app.add_typer(certs.app, name="certs")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"penstock {penstock.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[  # noqa: ARG001 - its callback acts
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option(help="The folder of the mesh; default: PENSTOCK_FOLDER, then .penstock.")
    ] = None,
) -> None:
    """Serve a cascade of language models on hardware you own."""
    if folder is not None:
        os.environ[targets.FOLDER_VARIABLE] = str(folder)  # where all commands look


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
