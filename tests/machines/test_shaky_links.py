"""A job whose links delay, lose, and for seconds carry nothing: no worker is lost, and no bit is another one."""

import time
from contextlib import suppress

import pytest

from headrace.trainer.journal.log_file import newest_generation, read_files
from headrace.trainer.journal.records import PassClose
from tests.machines.test_external import compared, four_agents, loopback_and_machines

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
DARK_S = 4.0
"""How long the link of a machine carries nothing, each time."""
NODE_TIMEOUT_S = 20.0


def newest_close(store):
    """The number of the newest closed pass. A file of the log may be pruned while it is read; then 0."""
    with suppress(FileNotFoundError):
        records = [each.content for file in read_files(store / "log") for each in file.records]
        return max((each.number for each in records if isinstance(each, PassClose)), default=0)
    return 0


@pytest.mark.parametrize("name", [pytest.param("criteo", marks=pytest.mark.slow), "news"])
def test_delay_loss_and_short_partitions_restart_nothing_and_change_no_bit(world, tmp_path, name):
    (head, second, third), _ = world
    expected, job = loopback_and_machines(name, tmp_path, world, node_timeout_s=NODE_TIMEOUT_S)
    token, launcher = job.token(), job.run()
    launcher.until("waits for 4 of 4 workers")
    second.shape(delay_ms=4, loss=0.01)
    third.shape(delay_ms=2, loss=0.002)
    agents = four_agents(job, token, world)
    for machine, after in ((third, 2), (second, 4)):
        until_s = time.monotonic() + 100
        while newest_close(head.tmp / "store") < after:
            assert time.monotonic() < until_s, job.said
            time.sleep(0.05)
        machine.cut()
        time.sleep(DARK_S)
        machine.heal()
    assert launcher.end(150) == 0, launcher.said
    assert [agent.end() for agent in agents] == [0] * 4
    assert compared(job.report) == compared(expected)
    assert newest_generation(head.tmp / "store" / "log") == 1, launcher.said
