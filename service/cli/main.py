"""The command line: all commands, and the entry point `main`.

Groups of commands are in modules of their own. All of them are imported to print a page of help, so at their top they
import typer, the standard library and small modules; what a command works with is imported in its function.
"""

import json
import sys
from typing import Annotated

import typer

import headrace
from headrace.lifecycle import exit_code_of
from headrace.service.cli import (
    demo_command,
    example_command,
    export_commands,
    fault_commands,
    guard_commands,
    history_commands,
    inspect_commands,
    join_token_command,
    prediction_commands,
    render_command,
    replica_command,
    resize_command,
    retrieve_command,
    run_command,
    serve_command,
    service_commands,
    size_command,
    spec_commands,
    suggest_command,
    sweep_command,
    table_commands,
    token_commands,
    tune_command,
    upgrade_command,
    worker_command,
)
from headrace.service.cli.arguments import Json
from headrace.service.cli.panels import Panel, PanelledGroup

WIDTH = 100
"""Most columns of a page of help."""
IN_ORDER = (
    run_command, demo_command, example_command, spec_commands, size_command, suggest_command, sweep_command,
    tune_command,
    history_commands, table_commands, guard_commands, inspect_commands,
    prediction_commands, retrieve_command, export_commands, replica_command,
    resize_command, fault_commands,
    serve_command, token_commands, service_commands, upgrade_command,
    worker_command, join_token_command, render_command,
)  # fmt: skip
"""The modules of the commands, in the order of each panel of help."""

cli = typer.Typer(
    cls=PanelledGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
)
for module in IN_ORDER:
    cli.add_typer(module.app)


@cli.command(rich_help_panel=Panel.OTHER)
def version(as_json: Json = False) -> None:
    """Print the version of Headrace.

    Example: headrace version
    """
    print(json.dumps({"version": headrace.__version__}) if as_json else headrace.__version__)


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@cli.callback()
def options(
    asked: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train a recommendation model on an event stream.

    Each command has a page of its own: headrace COMMAND --help

    Example: headrace run job.toml --fresh
    """


def main() -> None:
    """Run the command line. An error for the user is printed as one line."""
    sys.exit(exit_code_of(cli))
