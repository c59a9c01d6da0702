"""A job has the same digest and the same dead letters with any number of readers."""

import pytest

from tests.integration.stream_job import headrace, write_job
from tests.jobs import changed

GENERATOR = """
from headrace import DataGenerator

class Pairs(DataGenerator):
    def generate(self, event):
        a, b, click = event.split()
        yield {"a": [int(a)], "b": [int(b)], "click": [float(click)]}

Pairs().run()
"""
PLACES = {"embedded": (1, 0), "2 trainers x 2 shards": (2, 2)}


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("place", "protocol"),
    [
        ("embedded", "arrow"),
        *(
            pytest.param(PLACE, each, marks=pytest.mark.slow)
            for PLACE, each in (
                ("embedded", "multislot"),
                ("2 trainers x 2 shards", "arrow"),
                ("2 trainers x 2 shards", "multislot"),
            )
        ),
    ],
)
def test_readers_change_neither_the_digest_nor_the_dead_letters(tmp_path, place, protocol):
    path = write_job(tmp_path, num_lines=10)
    changes = {"sources.lines.paths": ["pairs.txt"], "pipe": {"command": ["python", "pairs.py"], "protocol": protocol}}
    changes |= {"slots": [{"names": ["a", "b"]}, {"name": "click", "kind": "meta"}], "sample": None, "metrics": None}
    changes |= {"pipe.processes": 2, "pipe.max_bad_fraction": 0.5, "train.matmul": "mkl", "train.threads": 1}
    path.write_text(changed(path.read_text(), changes))
    (tmp_path / "pairs.py").write_text(GENERATOR)
    lines = ("broken" if n % 50 == 7 else f"{n % 31} {n % 17} {int(n % 31 < 9)}" for n in range(4_000))
    (tmp_path / "pairs.txt").write_text("".join(f"{line}\n" for line in lines))
    trainers, shards = PLACES[place]
    found = []
    for readers in (0, 1, 3):
        store = tmp_path / f"store-{readers}"
        sizes = f"cluster={{trainers={trainers}, shards={shards}, readers={readers}}}"
        run = headrace(path, sizes, "passes.max_events=2_000", store=store.name)
        assert run.code == 0, run.output
        letters = {each.name: each.read_text() for each in (store / "dead_letters").iterdir()}
        found.append((run.report["digest"], letters))
        peers = {peer for links in run.report["links"].values() for peer in links}
        assert {peer for peer in peers if peer.startswith("reader")} >= ({"reader-0"} if readers else set())
    assert found[0] == found[1] == found[2]
    assert sum(text.count("\n") for text in found[0][1].values()) == 80
