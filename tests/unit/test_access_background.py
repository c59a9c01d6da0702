import threading
import time

import pytest

from headrace.errors import DeadlineExceeded, NotYet, SpecError
from headrace.service.jobs import background
from headrace.service.jobs.background import MAX_AT_ONCE, BackgroundWork, in_background


def test_what_the_work_gives_or_raises_is_handed_on():
    def refuse():
        raise SpecError("no", "store.path")

    assert in_background(lambda: threading.current_thread().name) == "background"
    with pytest.raises(SpecError, match="store.path: no"):
        in_background(refuse)


def test_work_that_its_disk_keeps_ends_for_the_request_at_the_deadline(monkeypatch):
    back = threading.Event()
    began_s = time.monotonic()
    stuck = BackgroundWork(back.wait, within_s=0.2)
    assert not stuck.ended()
    with pytest.raises(DeadlineExceeded, match="takes longer than 0.2 s: their disk is slow or unavailable"):
        stuck.result()
    assert stuck.ended() and time.monotonic() - began_s < 30
    back.set()


def test_some_are_done_at_a_time_and_a_place_comes_back_once_the_disk_does(monkeypatch):
    monkeypatch.setattr(background, "_places", threading.BoundedSemaphore(MAX_AT_ONCE))
    back, begun = threading.Event(), threading.Semaphore(0)

    def wait():
        begun.release()
        back.wait(10)

    threads = [threading.Thread(target=in_background, args=(wait,)) for _ in range(MAX_AT_ONCE)]
    for thread in threads:
        thread.start()
        begun.acquire()
    with pytest.raises(NotYet, match="retry"):
        in_background(lambda: 1)
    back.set()
    for thread in threads:
        thread.join()
    for _ in range(MAX_AT_ONCE + 1):
        assert in_background(lambda: 1) == 1
