"""Numbers and files that commands are given: what does not fit is refused at once, by the option's name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import typer
from typer.models import OptionInfo
from typer.testing import CliRunner

from penstock.cli import options
from penstock.cli.main import app
from penstock.types.ranges import Within
from tests.support.present import present

CHECKED_BY_THE_ROUTER = {"--temperature"}  # whose bounds are the engines'


def parameters() -> Iterator[tuple[str, str, set[Any]]]:
    """(command, option or argument, the types that it takes) of every command's parameters."""
    commands = list[tuple[str, Any]]()
    for name, one in typer.main.get_group(app).commands.items():
        commands.append((name, one.callback))
        commands += [(f"{name} {below}", c.callback) for below, c in getattr(one, "commands", {}).items()]
    for command, callback in commands:
        for name, hint in get_type_hints(present(callback), include_extras=True).items():
            if get_origin(hint) is Annotated:
                kind, info = get_args(hint)
                flags = (info.default, *(info.param_decls or ()))  # typer keeps the first flag where a default would be
                usual = f"--{name.replace('_', '-')}" if isinstance(info, OptionInfo) else name
                option = next((flag for flag in flags if str(flag).startswith("--")), usual)
                yield command, option, {kind, *get_args(kind)}


def numeric_options() -> list[tuple[str, str, bool]]:
    """(command, option or argument, whether it is a whole number) of all that take a number."""
    return [(command, name, int in kinds) for command, name, kinds in parameters() if kinds & {int, float}]


def test_there_are_numbers_to_check() -> None:
    found = {case[:2] for case in numeric_options()}
    assert {("plan", "--min-quality"), ("trace", "--limit"), ("plan rollback", "revision")} <= found
    assert len(found) > 35


@pytest.mark.parametrize(
    ("command", "option", "whole"), [case for case in numeric_options() if case[1] not in CHECKED_BY_THE_ROUTER]
)
def test_no_command_takes_a_number_that_makes_no_sense(command: str, option: str, whole: bool) -> None:
    """Negative, not a number, infinite, or far beyond anything real: status 2, the option's name, and no traceback."""
    for bad in ("-1", str(10**30)) if whole else ("-1", "nan", "inf", "-inf", "1e300"):
        given = [f"{option}={bad}"] if option.startswith("-") else ["--", bad]
        done = CliRunner(env={"COLUMNS": "500"}).invoke(app, [*command.split(), *given])
        assert done.exit_code == 2, (bad, done.output)
        assert isinstance(done.exception, SystemExit), (bad, done.exception)
        assert option.lower() in done.output.lower()
        assert "must be" in done.output


def test_the_bounds_themselves_fit_unless_the_lower_is_left_out() -> None:
    closed, opened = options.within(Within(1, 5)), options.within(Within(0, 5, above=True))
    assert [closed(1), closed(5), closed(None), opened(5), opened(1e-9)] == [1, 5, None, 5, 1e-9]
    for check, value in ((closed, 0), (closed, 6), (opened, 0.0), (opened, float("nan"))):
        with pytest.raises(typer.BadParameter, match="must be"):
            check(value)


def file_options() -> list[tuple[str, str]]:
    """(command, option) of all that name a file to write."""
    return [(command, name) for command, name, _ in parameters() if name in ("--out", "--labelled")]


@pytest.mark.parametrize(("command", "option"), file_options())
def test_a_file_that_cannot_be_written_is_said_before_the_work(command: str, option: str, tmp_path: Path) -> None:
    assert len(file_options()) >= 7
    (tmp_path / "folder").mkdir()
    for path, said in ((tmp_path / "none" / "x", "does not exist"), (tmp_path / "folder", "is a folder")):
        done = CliRunner(env={"COLUMNS": "500"}).invoke(app, [*command.split(), option, str(path)])
        assert done.exit_code == 2, done.output
        assert option in done.output
        assert said in done.output
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("given", [",", " ", ", ,"])
def test_a_target_names_a_router(given: str) -> None:
    for command, option, variable in (
        (["ask", "hello"], "--target", "PENSTOCK_TARGET"),
        (["status"], "--admin", "PENSTOCK_ADMIN"),
    ):
        for arguments, environment in (([option, given], {}), ([], {variable: given})):
            done = CliRunner(env=environment).invoke(app, [*command, *arguments])
            assert (done.exit_code, "must be host:port" in done.output) == (2, True)


@pytest.mark.parametrize(
    ("option", "said", "values"),
    [
        (
            "--instances",
            "TIER=COUNT",
            ("small", "=3", "small=-1", "small=1.5", "small=²", "small=9999999999", "small=nan"),
        ),
        ("--threshold", "from 0 to 100", ("small=-1", "small=101", "small=nan", "small=inf")),
    ],
)
def test_what_is_set_for_a_tier_is_a_count_or_a_score(option: str, said: str, values: tuple[str, ...]) -> None:
    for given in values:
        done = CliRunner().invoke(app, ["plan", "set", option, given])
        assert (done.exit_code, said in done.output) == (2, True), given
