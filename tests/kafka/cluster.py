"""A real Kafka for tests: one process that is broker and controller, on free ports of the loopback interface.

`Cluster` is started once a session. Fault tests start one of their own, which they may kill and start again.
Without java or mvn there is none: `why_not` says so, and with HEADRACE_REQUIRE_KAFKA=1 that is an error.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path

from kafka import KafkaAdminClient, KafkaProducer, TopicPartition
from kafka.admin import NewTopic
from kafka.errors import RetriableError

from headrace.deadline import Deadline
from headrace.durable import locked

HERE = Path(__file__).parent
LIBS = HERE / "libs"
READY_S, STOP_S, DOWNLOAD_S = 240, 20, 300
JAVA_OPTIONS = [
    "-Xms128m",
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
]


def why_not() -> str:
    """Why no broker can be started here; empty where one can."""
    missing = [program for program in ("java", "mvn") if shutil.which(program) is None]
    return f"no {' and no '.join(missing)} on this machine" if missing else ""


def required() -> bool:
    """Whether tests must fail, not skip, without Kafka."""
    return os.environ.get("HEADRACE_REQUIRE_KAFKA") == "1"


def fetch_jars() -> None:
    """Bring the jars that pom.xml names into libs/, once for each content of pom.xml; other test processes wait."""
    pom = (HERE / "pom.xml").read_text()
    stamp = LIBS / "fetched.pom.xml"
    with locked(HERE / "libs.lock", Deadline.after(DOWNLOAD_S)):
        if stamp.exists() and stamp.read_text() == pom:
            return
        shutil.rmtree(LIBS, ignore_errors=True)
        command = ["mvn", "-B", "-q", "dependency:copy-dependencies", f"-DoutputDirectory={LIBS}"]
        subprocess.run(command, cwd=HERE, check=True, timeout=DOWNLOAD_S, stdin=subprocess.DEVNULL)
        stamp.write_text(pom)


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


SETTINGS = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={folder}/data
auto.create.topics.enable=false
num.partitions=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
group.initial.rebalance.delay.ms=0
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=400
log.cleaner.backoff.ms=200
log.cleaner.dedupe.buffer.size=4194304
log.retention.ms=-1
log.retention.check.interval.ms=1000
num.network.threads=2
num.io.threads=2
"""


class Cluster:
    """One broker with its own folder; `start`, `stop`, `kill` and `start` again keep data and ports."""

    def __init__(self, folder: Path) -> None:
        fetch_jars()
        self.folder = folder
        self.port, controller_port = free_ports(2)
        self.servers = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._settings = folder / "server.properties"
        self._settings.write_text(SETTINGS.format(port=self.port, controller_port=controller_port, folder=folder))
        cluster_id = "MkU3OEVBNTcwNTJENDM2Qk"
        self._run("kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(self._settings))

    def _java(self, *arguments: str) -> list[str]:
        return ["java", *JAVA_OPTIONS, "-cp", f"{LIBS}/*", *arguments]

    def _run(self, *arguments: str) -> None:
        done = subprocess.run(self._java(*arguments), capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise RuntimeError(f"{arguments[0]} failed:\n{done.stdout}{done.stderr}")

    def start(self) -> None:
        """Start the broker and wait until it answers."""
        with (self.folder / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._java("kafka.Kafka", str(self._settings)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )
        until_s = time.monotonic() + READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until_s:
                self.kill()
                raise RuntimeError(f"Kafka did not start:\n{(self.folder / 'broker.log').read_text()[-4000:]}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        try:
            admin = self.admin()
        except RetriableError:
            return False
        with contextlib.closing(admin):
            return True

    def kill(self) -> None:
        """End it as kill -9 does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Let it shut down; what does not end in time is killed."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        for each in (number, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, each)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
                break
        self._process = None

    # What tests do with it

    def admin(self) -> KafkaAdminClient:
        """An admin client; the caller closes it."""
        return KafkaAdminClient(bootstrap_servers=self.servers, bootstrap_timeout_ms=2_000)

    def create_topic(self, partitions: int = 1, **settings: str) -> str:
        """A new topic with a name of its own."""
        name = f"t-{uuid.uuid4().hex[:12]}"
        configs = {key.replace("_", "."): value for key, value in settings.items()}
        with contextlib.closing(self.admin()) as admin:
            admin.create_topics([NewTopic(name, partitions, 1, topic_configs=configs)])
            admin.wait_for_topics([name])
        return name

    def producer(self, **options: object) -> KafkaProducer:
        """A producer; the caller closes it."""
        return KafkaProducer(bootstrap_servers=self.servers, **{"linger_ms": 5, "metrics_enabled": False} | options)

    def wait_for_marks(self, topic: str, partition: int = 0) -> None:
        """Wait until every ended transaction has its mark in a partition; the broker writes it a moment later."""
        part = TopicPartition(topic, partition)
        until_s = time.monotonic() + 10
        with contextlib.closing(self.admin()) as admin:
            while len({admin.list_partition_offsets({part: -1}, level)[part].offset for level in (0, 1)}) > 1:
                if time.monotonic() > until_s:
                    raise RuntimeError(f"a transaction in {topic}/{partition} stays open")
                time.sleep(0.01)

    def produce(
        self, topic: str, partition: int, values: list[bytes | None], key: bytes = b"k", **options: object
    ) -> None:
        """Append values to a partition, all with one key."""
        with contextlib.closing(self.producer(**options)) as producer:
            sent = [producer.send(topic, value=value, key=key, partition=partition) for value in values]
            producer.flush(timeout=30)
            for future in sent:
                future.get(timeout=30)
