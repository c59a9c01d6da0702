"""The service with its news job, who writes the stream, who follows the job, and whether they say the same of it."""

import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.trainer.predict.output_files import PredictionOutput
from tests.e2e.news_service import JOB, WITHIN_S, NewsService, Watching, spec
from tests.e2e.news_stream import NUM_PARTITIONS, Producer
from tests.integration.test_replica import Replica

RATE = 100
"""Events a second."""
TOLERANCE = 1e-5
AT = f"/jobs/{JOB}"


class NewsReplica(Replica):
    """A replica of the news job."""

    model, within_s = JOB, WITHIN_S

    def model_at(self, version):
        """Serve a version that is kept."""
        return self.get(f"/v2/models/{JOB}/rollback", {"version": version})

    def versions(self):
        """Those that are kept."""
        return [int(version) for version in self.get(f"/v2/models/{JOB}")["versions"]]

    def follow(self):
        """Serve the newest version again."""
        return self.get(f"/v2/models/{JOB}/follow", {})

    def answers(self, inputs, version):
        """What it says of a request's samples, with this version."""
        found = self.get(f"/v2/models/{JOB}/infer", {"inputs": inputs})
        assert found["model_version"] == str(version), self.said()
        return np.array(found["outputs"][0]["data"])


class World:
    def __init__(self, kafka, folder, events):
        self.folder, self.kafka = folder, kafka
        self.producer = Producer(kafka, events, RATE)
        self.news = NewsService(folder, kafka.servers)
        self.admin, self.operator, self.viewer = self.news.admin, self.news.operator, self.news.viewer
        self.watching = Watching(self.viewer)
        self.replicas = []
        self.feed_token = folder / "feed.token"
        self.feed_token.write_text(self.news.tokens["olga"])
        self.begun_s = time.monotonic()

    def say(self, words):
        """How far it is, for who reads `-s`."""
        print(f"{time.monotonic() - self.begun_s:6.1f} s  {words}", flush=True)

    def replica(self, *source):
        self.replicas.append(NewsReplica(self.folder, *source))
        return self.replicas[-1]

    def fed(self):
        return self.replica("--feed", self.news.job_url, "--feed-token-file", str(self.feed_token))

    def predicted(self, version, folder):
        """What a prediction job says of the newest events of each partition: its manifest, and its rows."""
        num = self.producer.num_written // NUM_PARTITIONS
        ranges = {str(number): [max(0, num - 60), num] for number in range(NUM_PARTITIONS)}
        slots = [name for entry in spec("", "")["slots"] for name in entry.get("names", [entry.get("name")])]
        asked = {
            "input": {"kafka": {"topic": self.producer.topic, "ranges": ranges}},
            "version": version,
            "output": f"predictions/{folder}",
            "columns": slots[:-2],
        }
        manifest = self.operator.do(f"{AT}/predictions", asked)
        output = self.news.data / "predictions" / folder
        table = pa.concat_tables([pq.read_table(path) for path in sorted(output.glob("part-*.parquet"))])
        assert (output / "_DONE").exists() and manifest["samples"] == len(table) > 0
        assert manifest["events"] == sum(end - begin for begin, end in ranges.values())
        assert PredictionOutput(output).metrics()["tasks"]["ctr"]["count"] == len(table)
        return manifest, table

    def clean_up(self):
        self.watching.leave()
        for replica in self.replicas:
            replica.process.kill()
            replica.process.wait()
            replica.log.close()
        self.news.clean_up()
        self.producer.end()


def compare(world, replica, table, version):
    """A prediction's rows are answered as they were predicted."""
    answers = replica.answers(inputs_of(table), version)
    difference = np.abs(answers - table["prediction.ctr"].to_numpy()).max()
    assert len(answers) == len(table) and difference <= TOLERANCE, difference
    world.say(f"{len(table)} predictions of version {version} and the replica's differ by {difference:.1e} at most")


def inputs_of(table):
    """A request for the samples of a prediction's rows, by the columns that it handed through."""
    found = []
    for name in table.column_names:
        if name.startswith(("partition", "offset", "sample", "label.", "prediction.")):
            continue
        values = table[name].to_pylist()
        flat = [each for sample in values for each in sample]
        if name == "length":
            found.append({"name": name, "datatype": "FP32", "shape": [len(values), 1], "data": flat})
            continue
        lengths = [len(each) for each in values]
        found.append({"name": name, "datatype": "UINT64", "shape": [len(flat)], "data": flat})
        found.append({"name": f"{name}.lengths", "datatype": "INT64", "shape": [len(values)], "data": lengths})
    return found
