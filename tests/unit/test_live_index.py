"""The index at the start of a pass reads rows in blocks, finds what a replica finds, and stops no job."""

import logging

import numpy as np
import pytest
import torch

from headrace.errors import DeadlineExceeded
from headrace.keys import sign_of_text
from headrace.pserver.errors import MessageTooLarge, ShardUnavailable
from headrace.trainer.train import live_index
from headrace.trainer.train.live_index import LiveIndex
from headrace.trainer.train.model_feed import FeedContent
from tests.fakes.exports import key
from tests.fakes.served_towers import GROUPS, TowersJob

WIDTH = 5


class Rank0:
    """A job with two towers; `looks` has how many keys were read at a time."""

    def __init__(self, folder, num_items=40):
        self.job, self.looks, self.error = TowersJob(folder, num_items), [], None
        self.job.update(1, whole=True)
        content = FeedContent(
            job="small", timeline="t1", generation=1, tensors=self.tensors, model=lambda: self.job.model,
            onnx=lambda: self.job.onnx, event_time_s=lambda: None, catalogue=self.job.files,
        )  # fmt: skip
        self.live = LiveIndex(content, self.look)

    def tensors(self):
        return {f"model.{name}": torch.from_numpy(array) for name, array in self.job.dense.items()}

    def look(self, tables, deadline):
        ((name, keys),) = tables.items()
        if self.error is not None:
            raise self.error
        assert len(keys.keys_U) == len(keys.group_U) and 0 < deadline.left_s() <= live_index.LOOK_S
        self.looks.append(len(keys.keys_U))
        rows = {key(*row, GROUPS): values for row, values in self.job.rows.items()}
        return {name: np.array([rows[each] for each in keys.keys_U.tolist()], np.float32)}

    def best(self, index, user=3):
        user_EV = (self.job.rows["user", user] @ self.job.dense["u"])[None]
        return index.best(user_EV, 7)[0].tolist()


def test_rows_are_read_in_blocks_and_the_best_items_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(live_index, "BLOCK_BYTES", 10 * (live_index.KEY_BYTES + 4 * WIDTH))
    rank0 = Rank0(tmp_path)
    found = rank0.best(rank0.live.at(1))
    assert found == [sign_of_text(name.encode()) for name, _ in rank0.job.best(3)[:7]]
    assert rank0.looks == [10, 10, 10, 10, 3], "40 items and their 3 kinds"


@pytest.mark.parametrize("error", [MessageTooLarge("the rows", "9 bytes"), DeadlineExceeded("out of time")])
def test_a_pass_whose_rows_do_not_come_is_not_measured_which_is_said_once(tmp_path, caplog, error):
    rank0 = Rank0(tmp_path)
    rank0.error = error
    with caplog.at_level(logging.WARNING):
        assert rank0.live.at(1) is None and rank0.live.at(2) is None
    assert [each.args[0] for each in caplog.records] == [error]
    rank0.error = None
    assert len(rank0.best(rank0.live.at(3))) == 7


def test_a_dead_shard_ends_the_generation(tmp_path):
    rank0 = Rank0(tmp_path)
    rank0.error = ShardUnavailable("shard 0", 5, "gone")
    with pytest.raises(ShardUnavailable):
        rank0.live.at(1)


def test_a_pass_that_is_not_measured_builds_no_tower(tmp_path, monkeypatch):
    built, tower = [], live_index.ItemTower
    monkeypatch.setattr(live_index, "ItemTower", lambda *given: built.append(1) or tower(*given))
    monkeypatch.setattr(live_index, "ITEMS_OF_A_PASS", 20)
    rank0 = Rank0(tmp_path, 41)
    assert [rank0.live.at(number) is not None for number in (1, 2, 3)] == [False, False, True] and len(built) == 1
    rank0.job.items.append(dict(rank0.job.items[0], item="new"))
    rank0.job.write()
    assert rank0.live.at(4) is None and len(built) == 1
