"""`penstock`: one command for everything."""

import typer

from penstock.cli import ask, demo, importing, local, measure, plan, planning, profile, stages, top, trace

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Serve a cascade of language models on hardware you own."
)
app.command("up")(local.up)
app.command("down")(local.down)
app.command("status")(top.status)
app.command("top")(top.top)
app.command("ask")(ask.ask)
app.command("chat")(ask.chat)
app.command("trace")(trace.trace)
app.command("demo")(demo.demo)
app.command("simulate")(planning.simulate)
app.command("profile")(profile.profile)
app.command("stages")(stages.stages)
app.command("import-profile")(importing.import_profile)
app.command("measure")(measure.measure)
app.add_typer(plan.app, name="plan")


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
