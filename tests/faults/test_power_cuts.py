"""A power cut at any instant leaves a log with every synced record and no invented one, and manifests that are whole.

A kill keeps the page cache; a cut does not. So a disk records what is asked of it, and from that every image is made
that a cut could leave: of what was not synced any part is there, in files and in folders each on its own, and of an
append any beginning, or its length with zeros in it. Each image must be readable, and the next claim must succeed.
"""

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from headrace.deadline import Deadline
from headrace.durable import RealDisk, write_whole
from headrace.trainer.journal import log as log_module
from headrace.trainer.journal.log import Log, LogDamaged, RecordKind, newest_generation, read
from tests.fakes.records import close, of_pass

MAX_LOOSE = 8
"""More unsynced names at once would make too many images; nothing that is tested here has so many."""
FOLDER = 0
"""In the place of a file's number: the name is a folder's."""


@dataclass(frozen=True)
class Content:
    """A file's durable bytes, and the changes since: appended bytes, or a length to cut to."""

    synced: bytes = b""
    loose: tuple[bytes | int, ...] = ()

    def now(self) -> bytes:
        """The content for a reader while the machine runs."""
        whole = self.synced
        for change in self.loose:
            whole = whole[:change] if isinstance(change, int) else whole + change
        return whole

    def images(self) -> set[bytes]:
        """The possible contents after a cut."""
        found = {self.synced}
        for index, change in enumerate(self.loose):
            whole = Content(self.synced, self.loose[:index]).now()
            cuts = (0, 1, len(change) // 2, len(change) - 1) if isinstance(change, bytes) else ()
            found |= {whole + change[:cut] + rest for cut in cuts for rest in (b"", bytes(len(change) - cut))}
            found.add(Content(self.synced, self.loose[: index + 1]).now())
        return found


@dataclass(frozen=True)
class Names:
    """Files by path: the durable names, and the changes since, each {path: file, or None for removed}."""

    synced: dict[Path, int] = field(default_factory=dict)
    loose: tuple[dict[Path, int | None], ...] = ()

    def after(self, changes) -> dict[Path, int]:
        """The durable names with `changes` applied."""
        names = dict(self.synced)
        for change in changes:
            names |= change
        return {path: file for path, file in names.items() if file is not None}

    def images(self) -> Iterator[dict[Path, int]]:
        """The possible names after a cut: any of the changes, each whole; a file is lost with its folder."""
        assert len(self.loose) <= MAX_LOOSE
        for kept in itertools.product([False, True], repeat=len(self.loose)):
            names = self.after(itertools.compress(self.loose, kept))
            yield {path: file for path, file in names.items() if path.parent in names or path.parent == Path()}

    def synced_in(self, folder: Path) -> "Names":
        """The same, after the names in `folder` are durable."""
        here = [change for change in self.loose if all(path.parent == folder for path in change)]
        return Names(self.after(here), tuple(change for change in self.loose if change not in here))


class RecordingDisk(RealDisk):
    """A disk below `root` that records every state in which a cut could leave it."""

    def __init__(self, root: Path, forgets=()):
        self.root, self.forgets = root, set(forgets)
        """The syncs that are left out, as if a kill came before them."""
        self.contents, self.names, self.promised = {}, Names(), None
        self.moments = []
        """(contents, names, promises so far)."""
        self._numbers, self._open = itertools.count(1), {}

    def promise(self, what) -> None:
        """From now on `what` survives every cut."""
        self.promised = what
        self._moment()

    def images(self) -> Iterator[tuple[dict[Path, bytes | None], object]]:
        """Every image of every moment once, each {path: bytes, or None for a folder}, with the promises."""
        seen = set()
        for contents, names, promised in self.moments:
            for image in names.images():
                files = sorted({number for number in image.values() if number != FOLDER})
                for data in itertools.product(*(sorted(contents[number].images()) for number in files)):
                    of = dict(zip(files, data, strict=True))
                    found = {path: of.get(number) for path, number in image.items()}
                    if (key := (frozenset(found.items()), repr(promised))) not in seen:
                        seen.add(key)
                        yield found, promised

    def _moment(self) -> None:
        self.moments.append((dict(self.contents), self.names, self.promised))

    def _named(self, change) -> None:
        here = {path.relative_to(self.root): file for path, file in change.items()}
        self.names = replace(self.names, loose=(*self.names.loose, here))
        self._moment()

    def _file(self, path: Path) -> int:
        return self.names.after(self.names.loose)[path.relative_to(self.root)]

    def _changed(self, file, change) -> None:
        content = self.contents[self._open[file]]
        self.contents[self._open[file]] = replace(content, loose=(*content.loose, change))
        self._moment()

    def create(self, path):
        file = super().create(path)
        self._open[file] = next(self._numbers)
        self.contents[self._open[file]] = Content()
        self._named({path: self._open[file]})
        return file

    def open(self, path):
        file = super().open(path)
        self._open[file] = self._file(path)
        return file

    def append(self, file, data):
        super().append(file, data)
        self._changed(file, data)

    def truncate(self, file, length):
        super().truncate(file, length)
        self._changed(file, length)

    def sync(self, file):
        if "sync" not in self.forgets:
            self.contents[self._open[file]] = Content(self.contents[self._open[file]].now())
        self._moment()

    def rename(self, source, target):
        super().rename(source, target)
        self._named({target: self._file(source), source: None})

    def link(self, source, target):
        super().link(source, target)
        self._named({target: self._file(source)})

    def remove(self, path):
        super().remove(path)
        self._named({path: None})

    def make_folder(self, path):
        if not path.exists():
            super().make_folder(path)
            self._named({path: FOLDER})

    def sync_folder(self, path):
        if "sync_folder" not in self.forgets:
            self.names = self.names.synced_in(path.relative_to(self.root))
        self._moment()


class NoSyncDisk(RealDisk):
    """A disk of a machine without power cuts."""

    def sync(self, file):
        pass

    def sync_folder(self, path):
        pass


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(log_module, "PART_BYTES", 200)


@pytest.fixture
def store(tmp_path):
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def lay_out(image, root: Path) -> Path:
    """Write `image` to the disk."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for path, data in sorted(image.items()):
        (root / path).mkdir() if data is None else (root / path).write_bytes(data)
    return root


def told(folder):
    return {record.number: (record.kind, record.body) for record in read(folder)}


class Story:
    """A log and all its records; a record is promised once its call has returned."""

    def __init__(self, store: Path, forgets=()):
        self.disk, self.folder = RecordingDisk(store, forgets), store / "log"
        self.told, self.kept_from = {}, 1

    def _promise(self):
        self.told |= told(self.folder)
        self.disk.promise([number for number in self.told if number >= self.kept_from])

    @contextmanager
    def claim(self, generation: int):
        log = Log.claim(self.folder, generation, Deadline.after(5), timeline="t1", disk=self.disk)
        self._promise()
        yield log
        log.close()

    def append(self, log, kind, number):
        log.append(of_pass(kind, number))
        self._promise()

    def prune(self, log, before, left_from):
        self.kept_from = left_from  # whatever is cut off, nothing from here on is lost
        self._promise()
        assert log.prune(before)
        self._promise()

    def check(self, place: Path) -> int:
        """Read every image, claim it for the next generation, read it again. Returns the number of images."""
        images = list(self.disk.images())
        for image, promised in images:
            folder = lay_out(image, place) / "log"
            found = told(folder)
            assert not set(promised or []) - set(found), "a synced record is lost"
            assert found.items() <= self.told.items(), "a record that nobody wrote"
            generation = newest_generation(folder) + 1
            Log.claim(folder, generation, Deadline.after(5), timeline="t1", disk=NoSyncDisk()).close()
            *before, last = told(folder).items()
            assert dict(before) == found and last[1][1]["generation"] == generation
        return len(images)


def a_life(story):
    """Claims, appends, a new file, pruning."""
    with story.claim(1) as log:
        story.append(log, RecordKind.PLAN, 1)
        story.append(log, RecordKind.CLOSE, 1)
        assert log.roll()
        story.append(log, RecordKind.PLAN, 2)
    with story.claim(2) as log:
        story.append(log, RecordKind.CLOSE, 2)
        story.prune(log, before=7, left_from=6)


def test_a_cut_at_any_instant_of_a_logs_life_loses_nothing_synced_and_invents_nothing(store, tmp_path):
    story = Story(store)
    a_life(story)
    assert story.check(tmp_path / "image") > 100


@pytest.mark.parametrize("left", [b'1 0badc0de {"n":3,"kind":"pl', None], ids=["torn record", "whole record"])
def test_a_cut_while_the_next_generation_claims_after_a_kill_before_the_sync(store, tmp_path, left):
    story = Story(store)
    with story.claim(1) as log:
        story.append(log, RecordKind.PLAN, 1)
        promised, story.disk.forgets = story.disk.promised, {"sync"}
        if left is None:
            log.append(close(1))
            story.told |= told(story.folder)
    if left is not None:
        with story.disk.open(store / "log" / "00000001-0001.log") as file:
            story.disk.append(file, left)
    story.disk.promise(promised)
    story.disk.forgets = set()
    with story.claim(2) as log:
        story.append(log, RecordKind.PLAN, 2)
    assert story.check(tmp_path / "image") > 20


def test_a_cut_while_the_next_generation_claims_after_a_kill_amid_a_claim(store, tmp_path):
    story = Story(store)
    with story.claim(1) as log:
        story.append(log, RecordKind.PLAN, 1)
    promised, story.disk.forgets = story.disk.promised, {"sync_folder"}
    Log.claim(story.folder, 2, Deadline.after(5), timeline="t1", disk=story.disk).close()
    story.told |= told(story.folder)
    story.disk.promise(promised)
    story.disk.forgets = set()
    with story.claim(3) as log:
        story.append(log, RecordKind.CLOSE, 1)
    assert story.check(tmp_path / "image") > 50


@pytest.mark.parametrize("forgotten", ["sync", "sync_folder"])
def test_the_images_reveal_a_missing_sync(store, tmp_path, forgotten):
    story = Story(store, {forgotten})
    with story.claim(1) as log:
        story.append(log, RecordKind.PLAN, 1)
    with pytest.raises((LogDamaged, AssertionError)):
        story.check(tmp_path / "image")


def test_after_a_cut_a_manifest_is_the_old_one_or_the_new_one_whole(store, tmp_path):
    disk, path, allowed = RecordingDisk(store), store / "manifest.json", {None: [None, b"old"]}
    for data, after in ((b"old", [b"old", b"new and longer"]), (b"new and longer", [b"new and longer"])):
        write_whole(disk, path, data)
        disk.promise(data)
        allowed[data] = after
    images = list(disk.images())
    for image, promised in images:
        place = lay_out(image, tmp_path / "image") / "manifest.json"
        assert (place.read_bytes() if place.exists() else None) in allowed[promised]
    assert {image.get(Path("manifest.json")) for image, _ in images} == {None, b"old", b"new and longer"}


@pytest.mark.parametrize("forgotten", ["sync", "sync_folder"])
def test_the_images_reveal_a_manifest_that_is_not_synced(store, forgotten):
    disk = RecordingDisk(store, {forgotten})
    write_whole(disk, store / "manifest.json", b"whole")
    disk.promise("whole")
    found = [image.get(Path("manifest.json")) for image, promised in disk.images() if promised]
    assert any(data != b"whole" for data in found)
