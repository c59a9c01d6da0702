"""Asks the chief of a running job for a commit, and waits for it.

The chief is found by the private files that its launcher keeps in the store: who may read them may ask.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millrace import documents
from millrace.deadline import Deadline
from millrace.errors import DeadlineExceeded, MillraceError, Unavailable
from millrace.role import RoleClient
from service.past.choosing import begins_at, lineage
from service.store import WORKERS, in_use
from trainer.commits import Commits, order_of

CALL_S = 5.0
"""How long one answer may take."""
LOOK_S = 0.1
"""How often the chief is asked whether the commit is made."""
CHIEF = "trainer-0"


class NotRunning(MillraceError):
    """There is no chief to ask."""

    def __init__(self, store: Path) -> None:
        super().__init__(
            f"no run is going on in {store}, so there is nobody to ask; what was learnt by the last one is committed, "
            "or in the log from which `millrace run` goes on"
        )


@contextmanager
def chief(store: Path) -> Iterator[RoleClient]:
    """The chief of the newest generation. Raises Unavailable between generations, NotRunning where there is no run."""
    if not in_use(store):
        raise NotRunning(store)
    folders = sorted((store / WORKERS).glob("g*"), key=lambda path: int(path.name[1:]))
    try:
        address = (folders[-1] / f"{CHIEF}.address").read_text(encoding="utf-8")
        secret = documents.read_object(folders[-1] / f"{CHIEF}.json")["secret"]
    except (IndexError, FileNotFoundError) as error:
        raise Unavailable(f"the chief of {store} is starting; ask again soon") from error
    client = RoleClient(address, secret)
    try:
        yield client
    finally:
        client.close()


def ask(client: RoleClient) -> int:
    """Ask for a commit; the version that it, or a later one, will hold: the last one closed, at least the first."""
    version = max(1, int(client.status(Deadline.after(CALL_S))["version"]))
    client.commit(Deadline.after(CALL_S))
    return version


def ask_commit(store: Path) -> int:
    """Ask the running chief for a commit, and come back at once; the version asked for."""
    with chief(store) as client:
        return ask(client)


def make_commit(store: Path, deadline: Deadline) -> str:
    """Have a commit made of what is closed by now; its name, once it is there.

    A chief that dies meanwhile is followed by another one, which is asked again. Raises MillraceError where the commit
    fails, NotRunning, and DeadlineExceeded.
    """
    wanted: int | None = None
    while (name := _made(store, wanted)) is None:
        deadline.check("waiting for the chief to start" if wanted is None else f"waiting for version {wanted}")
        try:
            with chief(store) as client:
                asked = ask(client)
                wanted = asked if wanted is None else wanted
                _await(client, wanted, deadline)
        except NotRunning:
            if _made(store, wanted) is None:
                raise
        except (Unavailable, DeadlineExceeded):
            time.sleep(LOOK_S)
    return name


def _made(store: Path, wanted: int | None) -> str | None:
    """The newest commit, if it is of the version wanted or later."""
    name = begins_at(Commits(store).names(), lineage(store)) if wanted is not None else None
    return name if name is not None and wanted is not None and order_of(name)[1] >= wanted else None


def _await(client: RoleClient, wanted: int, deadline: Deadline) -> None:
    while True:
        told: Mapping[str, Any] = client.status(Deadline.after(CALL_S)).get("commit") or {}
        if told.get("version", 0) >= wanted:
            return
        if told.get("failing"):
            raise MillraceError(f"the commit failed, the job goes on and will try again: {told['failing']}")
        deadline.check(f"waiting for version {wanted}")
        time.sleep(LOOK_S)
