"""A pipe command does not outlive the process that started it, however that ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.dataset.pipe.command import PACKAGES
from headrace.deadline import Deadline

HOST = """
import sys
from pathlib import Path
from headrace.dataset.spec.config import MetaSlot, PipeSection, SourceSection
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.stream.scripted_source import MemorySource
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.source import Segment
schema = Schema.of([MetaSlot(name="label", kind="meta")])
pipe = PipeSection(command=("python", "stuck.py"), protocol=sys.argv[1])
reader = SegmentReader(MemorySource([[b"x"]]), pipe, schema, SourceSection(), None, Path.cwd())
list(reader.read(0, [Segment("memory/0", 0, 0, 1)], PassTally()))
"""
STUCK = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)\n"


def eventually(condition) -> bool:
    patience = Deadline.after(30.0)
    while not condition() and not patience.passed():
        time.sleep(0.01)
    return condition()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("protocol", ["multislot", "arrow"])
def test_kill_9_of_the_trainer_ends_its_stuck_command(tmp_path, protocol):
    (tmp_path / "host.py").write_text(HOST)
    (tmp_path / "stuck.py").write_text(STUCK)
    environment = os.environ | {"PYTHONPATH": str(PACKAGES)}
    host = subprocess.Popen([sys.executable, "host.py", protocol], cwd=tmp_path, env=environment)
    try:
        told = tmp_path / "pid"
        assert eventually(lambda: told.exists() and told.read_text() != "")
        pid = int(told.read_text())
        assert is_alive(pid)
    finally:
        host.send_signal(signal.SIGKILL)
        host.wait()
    assert eventually(lambda: not is_alive(pid))
