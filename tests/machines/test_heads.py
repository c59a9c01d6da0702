"""Two heads of one job on machines of their own, with one object store: one that wakes late changes nothing."""

import json
import re
import sys
from contextlib import ExitStack
from urllib.parse import quote

import pytest

from tests.integration.followed_job import PASS_EVENTS, FollowedJob, closes
from tests.machines.lines import start
from tests.s3_server import ENVIRONMENT

pytestmark = pytest.mark.long

EXPORTED = re.compile(r"export (\d{10})-\w+ of serving: [\d,]+ rows")
SERVER = "import sys; from tests.s3_server import serve; serve(sys.argv[1])"
MAKE = "import sys, httpx; httpx.put(sys.argv[1], timeout=60).raise_for_status()"
READ = """
import json, sys
from headrace.blob.blob_store import open_blobs
from headrace.blob.store_address import parse
from headrace.deadline import Deadline
from headrace.trainer.journal.fence import decode
soon = Deadline.after(30)
job, exports = (open_blobs(parse(address), "read", soon) for address in sys.argv[1:])
records = [decode(0, job.get(f"fence/{name}", 1 << 26, soon)) for name in sorted(job.sizes("fence", soon))]
print(json.dumps({
    "fence": [[record.generation, record.content.kind] for record in records],
    "current": json.loads(exports.get("small/current.json", 1 << 20, soon) or "{}"),
}))
"""


class Store:
    """An object store on a machine of its own."""

    def __init__(self, held, machine):
        self.machine, self.held = machine, held
        port = start(held, machine, "-c", SERVER, machine.address, environment=ENVIRONMENT)
        port = port.until(lambda line: line.strip().isdigit()).strip()
        machine.call(sys.executable, "-c", MAKE, f"http://{machine.address}:{port}/bucket")
        options = f"scheme=http&endpoint_override={quote(f'{machine.address}:{port}')}&region=us-east-1"
        self.job, self.exports = f"s3://bucket/job?{options}", f"s3://bucket/exports?{options}"

    def run(self, machine, log_mirror):
        """Run the job of a machine, with its truth in here."""
        stream = f'{{serving={{path="{self.exports}",delta="1ms",clock="wall"}}}}'
        settings = {
            "store": f'{{path="store",parts="object",mirror="{self.job}",log_mirror="{log_mirror}"}}',
            "commit.every_passes": "1",
            "cluster.node_timeout": "2s",
            "exports": stream,
        }
        chosen = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        return start(
            self.held,
            machine,
            "-m",
            "headrace.service",
            "run",
            "job.toml",
            *chosen,
            environment=ENVIRONMENT,
            stdin=None,
        )

    def read(self):
        """The records of the fence, and current.json."""
        script = (sys.executable, "-c", READ, self.job, self.exports)
        with self.machine.start(script, environment=ENVIRONMENT, stdout=-1) as process:
            output, _ = process.communicate(timeout=60)
        return json.loads(output)


@pytest.fixture
def held():
    with ExitStack() as stack:
        yield stack


def trained(number):
    """Whether a line tells of so many passes, or of more: a new head counts those that it trains again."""
    return lambda line: (
        (found := re.search(r"  events ([\d,]+)", line)) is not None
        and int(found[1].replace(",", "")) >= number * PASS_EVENTS
    )


def exported(version):
    """Whether a line tells of an export of this version, or of a newer one."""
    return lambda line: (found := EXPORTED.search(line)) is not None and int(found[1]) >= version


def test_a_head_that_wakes_after_another_has_taken_over_is_refused_everywhere(held, machines):
    store_machine, old_machine, new_machine = machines(3)
    store = Store(held, store_machine)
    mine = FollowedJob(old_machine.tmp, 4)
    undisturbed = mine.undisturbed()
    twin = FollowedJob(new_machine.tmp, 4)
    for followed in (mine, twin):
        followed.follow()
        followed.arrive(2)
    old = store.run(old_machine, "sync")
    old.until(trained(2))
    old_machine.freeze()
    for followed in (mine, twin):
        followed.arrive(4)
    new = store.run(new_machine, "sync")
    new.until_said("on the same timeline")
    new.until(trained(4))
    taken = store.read()
    old_machine.thaw()
    code, output = old.end()
    assert code == 75 and "has claimed this job" in output, output
    new.once(exported(4))  # a job that is told to stop makes no further export
    new.process.terminate()
    code, output = new.end()
    assert code == 0, output
    found = store.read()
    first = next(number for number, (generation, _) in enumerate(found["fence"]) if generation == 2)
    assert found["fence"][: len(taken["fence"])] == taken["fence"]
    assert {generation for generation, _ in found["fence"][first:]} == {2}
    made = closes(new_machine.tmp / "store")
    assert found["current"]["head"] == {"timeline": 1, "generation": 2}
    assert found["current"]["version"] == max(made), output
    known = made.keys() & undisturbed.keys()  # the log before the oldest commit is gone
    assert known >= {3, 4} and all(made[number]["digests"] == undisturbed[number]["digests"] for number in known)


def test_a_head_that_cannot_reach_its_store_says_so_and_goes_on_when_it_can(held, machines):
    store_machine, machine = machines(2)
    store = Store(held, store_machine)
    followed = FollowedJob(machine.tmp, 4)
    followed.follow()
    followed.arrive(2)
    job = store.run(machine, "async")
    job.until(trained(2))
    store_machine.cut()
    job.until_said("the feed and exports stand still until it is")
    followed.arrive(4)
    job.until(trained(4))
    store_machine.heal()
    job.until_said("the feed and exports go on")
    job.until(exported(4))
    job.process.terminate()
    code, output = job.end()
    assert code == 0, output
    assert store.read()["current"]["version"] >= 4
