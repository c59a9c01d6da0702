"""Ranges of a Kafka topic predicted: each record of a range once, with its offset, whatever came since."""

import pytest

from tests.contract.predict_world import ARROW, content, make_world, rows_of

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"), ARROW.replace("[pipe]", "[pipe]\nmax_bad_fraction = 0.2"))


def test_the_records_of_a_range_are_predicted_with_their_offsets(kafka, world, tmp_path):
    lines = (world.job.folder / "part-0.txt").read_bytes().splitlines()
    topic = kafka.create_topic(partitions=2)
    for partition in range(2):
        kafka.produce(topic, partition, lines[partition::2])
    ranges = {"0": [10, 60], "1": [0, 20]}
    asked = {"topic": topic, "ranges": ranges, "options": {"bootstrap_servers": kafka.servers}}
    expected = []
    for partition, (begin, end) in ranges.items():
        for offset in range(begin, end):
            words = lines[2 * offset + int(partition)].split()
            num = 0 if words[4] == b"7" else int(words[6]) % 3
            expected += [(f"{topic}/{partition}", offset, sample) for sample in range(num)]
    for name, more in (("one", {}), ("two", {"trainers": 2, "shards": 1})):
        world.predict(tmp_path / name, input={"kafka": asked}, segment_events=15, **more)
    table = rows_of(tmp_path / "one")
    found = zip(*(table[name].to_pylist() for name in ("partition", "offset", "sample")), strict=True)
    assert list(found) == expected
    assert content(tmp_path / "one") == content(tmp_path / "two")
