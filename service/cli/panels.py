"""The panels of `headrace --help`, and the group of commands that shows them.

The pages are plain text: Rich would take longer to load than everything else that a page needs.
"""

from enum import StrEnum
from typing import Any

from typer.core import TyperGroup


class Panel(StrEnum):
    """A part of the list of commands. In the order of a day's work."""

    TRAIN = "Train"
    LOOK = "Look at a job"
    SERVE = "Predict and serve"
    OPERATE = "Operate a job"
    SERVICE = "Share a machine: jobs of a service"
    CLUSTER = "Use several machines"
    OTHER = "Other"


class PanelledGroup(TyperGroup):
    """A group of commands that is listed by panel, each command with the first sentence of its help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list. Commands without a panel come last."""
        width = max(len(name) for name in self.commands)
        for panel in (*Panel, None):
            rows = [
                (f"{name:{width}}", _first_sentence(command.help or ""))
                for name, command in self.commands.items()
                if (getattr(command, "rich_help_panel", None) or None) == panel  # typer has a placeholder for none
            ]
            if rows:
                with formatter.section(panel or "Commands"):
                    formatter.write_dl(rows)


def _first_sentence(text: str) -> str:
    return text.partition("\n")[0].partition(". ")[0].removesuffix(".")
