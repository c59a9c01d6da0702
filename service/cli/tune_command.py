"""`headrace tune`: tries settings of a job on its stream, prints the table and what to put into the job file."""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.errors import SpecError
from headrace.printable import print_printable
from headrace.service.cli.arguments import Json, Overrides, SpecFile
from headrace.service.cli.panels import Panel
from headrace.service.planning.toml_text import toml_value

if TYPE_CHECKING:
    from headrace.trainer.tuning_status import TriedStatus, TuningStatus


app = typer.Typer()


@app.command(rich_help_panel=Panel.TRAIN)
def tune(
    job: SpecFile,
    events: Annotated[
        int | None,
        typer.Option("--events", min=64, metavar="N", help="Events to learn.", show_default="tuning.events"),
    ] = None,
    settings: Annotated[
        int | None,
        typer.Option("--settings", min=2, max=64, metavar="N", help="Settings to try.", show_default="tuning.settings"),
    ] = None,
    newest: Annotated[bool, typer.Option("--newest", help="Learn the newest events, not the first ones.")] = False,
    overrides: Overrides = [],  # noqa: B006  # typer copies it
    as_json: Json = False,
) -> None:
    """Try settings that a job file leaves out, and print the best ones as keys of the file.

    It reads the stream through source and pipe, once, and changes nothing: the job may run meanwhile.

    Example: headrace tune job.toml --events 50000
    """
    from headrace.lifecycle import stop_flag
    from headrace.private_folder import private_folder
    from headrace.service.cluster.child import Spawner
    from headrace.service.cluster.tuning import Tuning
    from headrace.service.spec.job import load_job

    given = {"events": events, "settings": settings}
    more = [f"tuning.{key}={value}" for key, value in given.items() if value is not None]
    tuning = Tuning.of(load_job(job, [*overrides, *more]), newest=newest)
    if len(tuning.settings) < 2:
        raise SpecError("the job file sets all that is tuned; leave out train.batch_size, tables.*.dim or the rates")
    with private_folder("tune") as folder, stop_flag() as stopping:
        tried = tuning.tried(folder / "trials", folder, Spawner(), stopping.wait, _Shown())
    if as_json:
        from headrace.codec import plain

        print(json.dumps([plain(each) for each in tried], indent=2))
        return
    _print(tried)


class _Shown:
    """Prints each trial once, to standard error."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, status: "TuningStatus") -> None:
        from headrace.service.monitor.lines import tuning_text

        if (text := tuning_text(status)) and text != self._last:
            print_printable(text, file=sys.stderr, flush=True)
            self._last = text


def _print(tried: "list[TriedStatus]") -> None:
    from headrace.service.monitor.lines import tried_lines

    print_printable(*tried_lines(tried), "", sep="\n")
    if not tried[0].keys:
        print_printable("no setting is clearly better than the job file as it is")
        return
    print_printable("# the chosen setting, for the job file:", *file_lines(tried[0].keys), sep="\n")


def file_lines(keys: Mapping[str, Any]) -> Iterator[str]:
    """Values by the path of their key, as text of a job file."""
    sections: dict[str, dict[str, Any]] = {}
    for path, value in keys.items():
        section, _, key = path.rpartition(".")
        sections.setdefault(section, {})[key] = value
    for section in sorted(sections):
        yield f"[{section}]"
        yield from (f"{key} = {toml_value(value)}" for key, value in sections[section].items())
