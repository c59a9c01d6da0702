"""How fast a job's log is read: whole, as a restart reads it, and page by page while it grows, as the API does.

A log of 20,000 records: 10,000 passes of four partitions, with metrics of one task. A page is the newest 50 lines,
asked for after each 10 new records; beside it the same page made from a whole read. Medians of ROUNDS rounds, CPU
seconds.

`python -m tests.bench.job_log` prints the figures as JSON.
"""

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.dataset.stream.source import Segment
from headrace.service.history.log_pages import LogPages
from headrace.service.history.log_text import log_lines
from headrace.trainer.journal.log import read
from headrace.trainer.journal.log_file import file_name, line_of
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import Claim, Content, PassClose

NUM_RECORDS, NEW_RECORDS, PAGE, ROUNDS, NUM_PARTITIONS = 20_000, 10, 50, 7, 4
EVENTS = 2000
DIGESTS = {"dense": "d" * 64, "pushes": "e" * 32, "metrics": "f" * 64}
WINDOW = {"ctr": {"auc": 0.71234567, "gauc": 0.6512345, "logloss": 0.456789, "calibration": 1.0123, "rmse": 0.4123}}


def records() -> Iterator[Content]:
    """A claim, and then passes without end."""
    yield Claim(generation=1, timeline="t1", facts={"host": "mill", "pid": 1})
    number, share = 0, EVENTS // NUM_PARTITIONS
    while number := number + 1:
        begin, end = share * (number - 1), share * number
        segments = tuple(Segment(f"clicks/{p}", p, begin, end, "topic") for p in range(NUM_PARTITIONS))
        yield PassPlan(number, (segments,))
        yield PassClose(
            number=number, day=3, events=EVENTS, samples=EVENTS - 10, rejected={"parse": 10, "late": 0},
            digests=DIGESTS, event_time_s=1.7e9 + number, window=WINDOW,
        )  # fmt: skip


def taken_s(work: Callable[[], object]) -> float:
    """CPU seconds."""
    gc.collect()
    begin_s = time.process_time()
    work()
    return time.process_time() - begin_s


def figures() -> dict[str, dict]:
    """See above."""
    whole, pages, reread = list[float](), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = (line_of(number, content) for number, content in enumerate(records(), start=1))
        with (folder / file_name(1, 1)).open("wb") as file:
            file.writelines(next(lines) for _ in range(NUM_RECORDS))
            file.flush()
            followed = LogPages(folder)
            first_s = taken_s(lambda: followed.newest(PAGE))
            for _ in range(ROUNDS):
                file.writelines(next(lines) for _ in range(NEW_RECORDS))
                file.flush()
                whole.append(taken_s(lambda: read(folder)))
                reread.append(taken_s(lambda: list(log_lines(read(folder)))[-PAGE:]))
                pages.append(taken_s(lambda: followed.newest(PAGE)))
    return {
        "a log of 20,000 records": {
            "whole_read_s": round(statistics.median(whole), 3),
            "us_a_record": round(1e6 * statistics.median(whole) / NUM_RECORDS, 1),
            "first_page_s": round(first_s, 3),
            "page_ms, followed": round(1e3 * statistics.median(pages), 2),
            "page_ms, from a whole read": round(1e3 * statistics.median(reread), 1),
        }
    }


if __name__ == "__main__":
    print(json.dumps(figures(), indent=1))
