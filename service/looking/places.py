"""What an argument of these commands means: an export by its address, or a commit of a job."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from service.looking.states import CommitState, ExportState, State
from service.past.choosing import chosen
from service.past.leases import leased, scratch
from service.spec import LoadedJob
from service.store import check_run
from trainer.commits import Commit, Commits
from trainer.exports.reading import open_export


@contextmanager
def exports() -> Iterator[Path]:
    """A folder for what is fetched of exports; gone at the end."""
    with tempfile.TemporaryDirectory(prefix="millrace-exports-") as folder:
        yield Path(folder)


@contextmanager
def commit_of(job: LoadedJob, name: str) -> Iterator[Commit]:
    """A commit by its name or version, kept from being pruned meanwhile. Raises SpecError, CommitDamaged."""
    check_run(job.store, job.spec.name)
    commit = chosen(job.store, name)
    with leased(Commits(job.store), commit.name, "verify"):
        yield commit


@dataclass(frozen=True, slots=True)
class Where:
    """Exports, or with a job its commits."""

    job: LoadedJob | None

    @contextmanager
    def states(self, *names: str) -> Iterator[list[State]]:
        """Whole models of these names."""
        with ExitStack() as held:
            if self.job is None:
                folder = held.enter_context(exports())
                yield [ExportState(open_export(name, folder).check()) for name in names]
                return
            commits = [held.enter_context(commit_of(self.job, name)) for name in dict.fromkeys(names)]
            by_name = dict(zip(dict.fromkeys(names), commits, strict=True))
            folder = held.enter_context(scratch(self.job.store))
            yield [CommitState(by_name[name], folder / str(number)) for number, name in enumerate(names)]
