"""When rank 0 publishes a version, and the model."""

import numpy as np
import pytest
import torch

from headrace.errors import Unavailable
from headrace.pserver.feed.feed_messages import part_of
from headrace.pserver.feed.payloads import encoded
from headrace.pserver.feed.publisher import Subscription
from headrace.pserver.proto import feed_pb2 as pb
from headrace.pserver.server.commands import PublishVersion
from headrace.trainer.train.model_feed import FeedContent, ModelFeed


class Shards:
    """Shards that record what rank 0 asks them to publish."""

    def __init__(self):
        self.published, self.secrets = [], []

    def call(self, command, deadline):
        if isinstance(command, PublishVersion):
            return self.published.append(command.version)
        self.secrets.append(command.secret)
        return ["127.0.0.1:1"]


class World:
    def __init__(self):
        self.weights, self.model, self.traced, self.whole = torch.zeros(2), {"format": 1}, 0, {"": None}
        self.shards = Shards()
        tensors = lambda: self.whole and {"model.w": self.weights, "optimizer.m": self.weights}  # noqa: E731
        times = {3: {"oldest_s": [11.0], "count": [2]}}
        telling = FeedContent("job", "t1", 4, tensors, lambda: self.model, self.trace, lambda: 12.5, times.get)
        self.trouble, self.while_traced = "", lambda: None
        self.rank0 = ModelFeed(telling, self.shards, trouble=lambda: self.trouble)

    def trace(self):
        self.traced += 1
        self.while_traced()
        return b"graph"

    def listen(self):
        subscription = Subscription()
        assert list(self.rank0.open(subscription, 0, 0)) == []
        return subscription


@pytest.fixture
def world():
    made = World()
    yield made
    made.rank0.shut()


def heard(subscription):
    return [part_of(pb.FeedPart.FromString(encoded(message))) for message in subscription.waiting()]


def test_without_subscribers_nothing_is_published_copied_or_traced(world):
    world.rank0.tick(1)
    gone = world.listen()
    world.rank0.close(gone)
    world.rank0.tick(2)
    assert not world.shards.published and not world.traced and not heard(gone)


def test_nothing_is_published_and_nobody_is_told_where_while_there_is_trouble(world):
    subscription = world.listen()
    world.rank0.tick(1)
    heard(subscription)
    world.trouble = "the object store was not reached"
    world.rank0.tick(2)
    assert heard(subscription) == [] and world.shards.published == [1]
    with pytest.raises(Unavailable, match="the object store was not reached"):
        world.rank0.answer({})
    world.trouble = ""
    world.rank0.tick(2)
    assert [part.version for part in heard(subscription)] == [2]


def test_a_new_subscriber_receives_the_model_and_the_version_at_the_next_tick(world):
    first = world.listen()
    world.rank0.tick(0)  # there is none yet
    assert heard(first) == [] and not world.shards.published
    world.rank0.tick(3)
    begin, version = heard(first)
    assert begin.onnx == b"graph" and begin.facts == {
        "job": "job",
        "timeline": "t1",
        "generation": 4,
        "model": {"format": 1},
    }
    assert version.version == 3 and version.facts == {
        "event_time_s": 12.5,
        "event_times": {"oldest_s": [11.0], "count": [2]},
    }
    assert list(version.tensors) == ["w"] and version.tensors["w"].tolist() == [0, 0]
    world.rank0.tick(3)
    assert heard(first) == [] and world.shards.published == [3]
    second = world.listen()
    world.rank0.tick(3)
    assert [part.kind for part in heard(second)] == [pb.FeedPart.BEGIN, pb.FeedPart.VERSION]
    assert [part.version for part in heard(first)] == [3]
    assert world.shards.published == [3, 3] and world.traced == 1


def test_one_that_subscribes_while_the_model_is_traced_receives_it_with_the_next_version(world):
    late = []
    world.listen()
    world.while_traced = lambda: late.append(world.listen())
    world.rank0.tick(3)
    assert heard(late[0]) == []
    world.rank0.tick(3)
    begin, version = heard(late[0])
    assert begin.onnx == b"graph" and version.version == 3


def test_a_subscriber_that_has_read_its_base_requests_the_version_again(world):
    one = world.listen()
    world.rank0.tick(3)
    world.rank0.poke()
    world.rank0.tick(3)
    world.rank0.tick(3)
    assert [part.version for part in heard(one)] == [0, 3, 3]


def test_a_published_version_does_not_change_with_the_next(world):
    one = world.listen()
    world.rank0.tick(1)
    world.weights.fill_(9)
    (told,) = (part for part in heard(one) if part.version)
    assert np.array_equal(told.tensors["w"], [0, 0])


def test_a_changed_description_is_sent_to_all_without_the_graph(world):
    one = world.listen()
    world.rank0.tick(1)
    heard(one)
    world.model = {"format": 1, "default_row": [1.0]}
    world.rank0.tick(2)
    begin, version = heard(one)
    assert begin.facts["model"] == world.model and begin.onnx == b"" and version.version == 2


def test_ports_are_opened_at_the_first_request_and_stay(world):
    assert not world.shards.secrets
    answer = world.rank0.answer({"do": "feed"})
    assert world.rank0.answer({"do": "feed"}) == answer and world.shards.secrets == [answer["secret"]]
    assert answer["shards"] == ["127.0.0.1:1"] and (answer["job"], answer["generation"]) == ("job", 4)


def test_a_model_whose_parts_are_with_other_ranks_is_published_once_they_are_gathered(world):
    world.whole, subscription = None, world.listen()
    world.rank0.tick(1)
    assert not heard(subscription) and not world.shards.published and world.rank0.due(1), "rank 0 lacks some"
    world.whole = {"": None}
    world.rank0.tick(1)
    assert [part.version for part in heard(subscription)][-1:] == [1] and not world.rank0.due(1)
