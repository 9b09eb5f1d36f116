"""The `penstock` command."""

import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import penstock

MODULES = {
    "local": ("up", "down"),
    "check": ("check",),
    "top": ("status", "top"),
    "ask": ("ask", "chat"),
    "trace": ("trace",),
    "demo": ("demo",),
    "simulate": ("simulate",),
    "profile": ("profile",),
    "stages": ("stages",),
    "trace_files": ("export-trace", "import-trace"),
    "measure": ("measure",),
    "predictor": ("predictor",),
    "usage": ("usage",),
    "redis_users": ("redis-users",),
    "values": ("values",),
    "plan": ("plan",),
    "keys": ("keys",),
    "certs": ("certs",),
}
"""With the functions of these commands, or with `app`, a group of commands."""
COMMANDS = {command: module for module, commands in MODULES.items() for command in commands}


class _Commands(Mapping[str, Any]):
    """Imports the module of a command when it is called: those of all commands take longer than many a command."""

    def __getitem__(self, name: str) -> Any:
        module, alone = import_module(f"penstock.cli.{COMMANDS[name]}"), typer.Typer()
        if hasattr(module, "app"):
            alone.add_typer(module.app, name=name)
        else:
            alone.command(name)(getattr(module, name.replace("-", "_")))
        return typer.main.get_group(alone).commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Root(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"commands": _Commands()})


app = typer.Typer(cls=_Root, no_args_is_help=True, add_completion=False)


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
        from penstock.cli.targets import FOLDER_VARIABLE

        os.environ[FOLDER_VARIABLE] = str(folder)  # where all commands look


if __name__ == "__main__":
    app()
