"""The rows of a table by the plain rules: every row multiplied every day, what a shrink takes removed at once.

What pserver.tables.table must not be told apart from, in the fewest lines: dictionaries and loops.
"""

from dataclasses import dataclass

import numpy as np

from headrace.pserver.config import extends
from headrace.pserver.rows.initial_values import DRAWS, initial_vector_reference, spread_of
from headrace.pserver.rows.kernels import clip_rows_reference
from headrace.pserver.rows.row_settings import optimizer_of
from headrace.pserver.rows.slot_classes import classes_of
from headrace.pserver.rows.weight_decay import decay_reference

F = np.float32


@dataclass
class PlainRow:
    floats_W: np.ndarray
    group: int
    whole: bool
    show: np.float32 = F(0)
    click: np.float32 = F(0)
    delta: np.float32 = F(0)
    seen: int = 0
    changed: int = 0
    owed: int = 0
    """Passes of weight decay."""


class PlainTable:
    def __init__(self, section, groups, table_seed):
        self.section, self.groups, self.seed = section, groups, int(table_seed)
        self.rows, self.day, self.touched, self.frozen = {}, 0, set(), set()
        self.version = 0

    def set(self, section):
        if section.weight_decay != self.section.weight_decay:
            self.forgive(self.rows.values())
        self.section = section

    def reach(self, version):
        """Passes go by."""
        for row in self.rows.values():
            row.owed += version - self.version
        self.version = version

    def forgive(self, rows):
        for row in rows:
            row.owed = 0

    def own(self, group):
        return classes_of(self.section, self.groups).section_of(group)

    def new(self, key, group):
        """A row at its initial value, with its vector only where it is born with it."""
        row = PlainRow(self.start(key, group), group, whole=self.own(group).extend_at is None)
        floats_W = row.floats_W
        if not row.whole:
            floats_W[optimizer_of(self.section).parts_W == 1] = 0
        if extends(self.section):
            floats_W[-1] = row.whole
        return row

    def start(self, key, group):
        """The floats of a new row with its vector."""
        own, optimizer = self.own(group), optimizer_of(self.section)
        first = int(own.first_order)
        vector = initial_vector_reference(key, own.dim, spread_of(own), self.seed, DRAWS[own.init])
        floats_W = np.concatenate([np.zeros(first, F), vector, optimizer.start_state])
        if start := optimizer.kernels.start:
            settings, no_class = optimizer_of(own).settings[None], np.zeros(1, np.uint8)
            start(floats_W[None], np.zeros(1, np.uint16), 0, 1, first, first + own.dim, settings, no_class)
        return floats_W

    def read(self, key, group=None):
        """Weights; with `group`, as a pull to learn."""
        if key not in self.rows and group is None:
            return [0.0] * self.num_weights
        row = self.rows.get(key) or self.new(key, group)
        return row.floats_W[: self.num_weights].tolist()

    @property
    def num_weights(self):
        return int(self.section.first_order) + self.section.dim

    def learn(self, key, group, grad_D, show, click, version):
        row, own = self.rows.setdefault(key, self.new(key, group)), self.own(group)
        optimizer, before_W = optimizer_of(own), row.floats_W.copy()
        if own.clip_norm is not None:
            grad_D = clip_rows_reference(grad_D[None], own.clip_norm)[0]
        if group not in self.frozen:
            decay_reference(row.floats_W, row.owed, self.num_weights, F(1 - self.section.weight_decay))
            optimizer.kernels.reference(row.floats_W, grad_D, int(own.first_order), optimizer.settings)
        if not row.whole:
            absent_W = optimizer_of(self.section).parts_W != 0
            row.floats_W[absent_W] = before_W[absent_W]
        row.show, row.click = row.show + F(show), row.click + F(click)
        row.delta += F(F(show) - F(click)) * F(own.nonclk_coeff) + F(click) * F(own.click_coeff)
        row.changed, row.owed = version, 0
        self.touched.add(key)
        if not row.whole and group not in self.frozen and self.score(row) >= F(own.extend_at):
            row.whole = True
            row.floats_W = np.where(optimizer_of(self.section).parts_W == 0, row.floats_W, self.start(key, group))

    def score(self, row):
        return (row.show - row.click) * F(self.section.nonclk_coeff) + row.click * F(self.section.click_coeff)

    def tick(self, day):
        for _ in range(self.day, day):
            for row in self.rows.values():
                rate = F(self.own(row.group).decay)
                row.show, row.click = row.show * rate, row.click * rate
        self.day = max(day, self.day)

    def close(self, day):
        self.tick(day)
        for key in self.touched:
            self.rows[key].seen = self.day
        self.touched = set()

    def shrink(self, below, after):
        for key, row in list(self.rows.items()):
            own = self.own(row.group)
            low, late = (below, after) if (below, after) != (None, None) else (own.delete_below, own.delete_after_days)
            if (low is not None and self.score(row) < F(low)) or (late is not None and self.day - row.seen > late):
                del self.rows[key]

    def freeze(self, group):
        self.frozen.add(group)

    def unfreeze(self, group):
        if group in self.frozen:
            self.forgive(row for row in self.rows.values() if row.group == group)
        self.frozen.discard(group)

    def clear(self, group):
        self.rows = {key: row for key, row in self.rows.items() if row.group != group}

    def forget(self, key):
        self.rows.pop(key, None)
