"""Which commit a person means by a name or a version. Pure but for the reading of store and log."""

from pathlib import Path

from millrace.errors import SpecError
from trainer.commits import VERSION, Commit, Commits, order_of
from trainer.rewind import Lineage, claims


def lineage(store: Path) -> Lineage:
    """Which versions led to the present one, even if the log is damaged."""
    return Lineage.of(claims(store / "log"))


def chosen_name(names: list[str], text: str, past: Lineage) -> str:
    """The commit called `text`, or of the version `text`: the newest one of it that led to where the job stands.

    `names` are in order of time. Raises SpecError where there is none.
    """
    if text in names:
        return text
    known = f"there are: {', '.join(names[-20:])}" if names else "there are no commits"
    if VERSION.fullmatch(text) is None:
        raise SpecError(f"there is no commit {text!r:.100}; {known}")
    found = [name for name in names if order_of(name)[1] == int(text)]
    ours = [name for name in found if past.holds(name)]
    if ours:
        return ours[-1]
    if found:
        raise SpecError(f"version {text} is one of another timeline only; name the commit: {', '.join(found)}")
    raise SpecError(f"there is no commit of version {text}; {known}")


def chosen(store: Path, text: str) -> Commit:
    """The commit in `store` that `text` means; see `chosen_name`. Raises SpecError, CommitDamaged."""
    commits = Commits(store)
    names = commits.names()
    return commits.read(text if text in names else chosen_name(names, text, lineage(store)))


def begins_at(names: list[str], past: Lineage) -> str | None:
    """Where a run begins: the newest of these, in order of time, that is of the present timeline or its base."""
    timeline, base = past.timeline, past.bases.get(past.timeline)
    ours = (name for name in reversed(names) if not timeline or name == base or name.startswith(f"{timeline}-"))
    return next(ours, None)
