"""How rows age: days, decay of show and click, rows absent after a shrink, delta scores cleared by exports.

All of it is lazy. A row holds its show and click as of its last_seen_day and its delta_score as of its last push. A
push brings a row up to date (`bring`); every reader computes the present values without storing them. Days are ticks
of one table. The rate of every tick is stored, and rates are applied one by one, as products. A shrink deletes rows
that meet its rule and have not changed since. Such rows *are absent* from the close at which the shrink acted;
`TableAging` keeps the shrink until all of them are removed (pserver.tables.sweeping). It also knows since when rows owe
weight decay: none for passes before the present one was set, nor before their slot was unfrozen.

Shapes: R rows of a table, U rows chosen, G slot groups, T ticks, K columns of settings (0: the table's, then one for
each slot group that has or had settings of its own), S shrinks, X cuts.
"""

import threading
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.config import MAX_FLOAT32
from headrace.kernel_cache import njit
from headrace.pserver.config import TableSection
from headrace.pserver.protocol.commit_parts import AgingState, AppliedCut, AppliedShrink
from headrace.pserver.protocol.table_operations import ExportCut, ShrinkRows
from headrace.pserver.rows.slot_classes import NUM_GROUPS, SlotClasses, classes_of

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]

STAYS, BELOW, UNSEEN = np.uint8(0), np.uint8(1), np.uint8(2)
"""The verdict of a shrink on a row: it stays, its score is too low, or only its age is too high."""
KEEPERS = "base_threshold", "delta_keep_days", "delta_threshold"
"""The thresholds that can keep a row out of an export."""
NEVER = -1
"""In place of a number of days: no age is too high. In place of a version: none."""


class RowStatistics(NamedTuple):
    """The columns of rows that age, of a table or of rows read from a store. (R,) each."""

    show: F32
    click: F32
    delta_score: F32
    last_seen_day: NDArray[np.int16]
    changed_version: U32
    group: NDArray[np.uint16]

    @classmethod
    def of_words(cls, words_UW: U32) -> "RowStatistics":
        """From rows in the format of pserver.rows.row_format."""
        return cls(
            words_UW[:, 2].copy().view(np.float32),
            words_UW[:, 3].copy().view(np.float32),
            words_UW[:, 4].copy().view(np.float32),
            (words_UW[:, 0] >> np.uint32(16)).astype(np.uint16).view(np.int16),
            words_UW[:, 1].copy(),
            (words_UW[:, 0] & np.uint32(0xFFFF)).astype(np.uint16),
        )


TABLE = -1
"""Key of the table's own settings among slot groups."""


class TableAging:
    """Days, rates, shrinks and cuts of one table on one shard; equal on all shards.

    Any thread may read. One thread changes it, and another reports what is swept.
    """

    def __init__(self, section: TableSection, groups: Mapping[str, int]) -> None:
        self._turn = threading.RLock()
        self.day = 0
        self.shrinks: tuple[AppliedShrink, ...] = ()
        """Shrinks whose rows are not all removed. Replaced, never changed in place."""
        self._cuts: tuple[AppliedCut, ...] = ()
        self.frozen_groups: frozenset[int] = frozenset()
        """Slot groups whose rows do not learn. Replaced, never changed in place."""
        self._thawed: Mapping[int, int] = {}
        """As in AgingState. Replaced, never changed in place."""
        self._thawed_G: U32 | None = None
        self._decay = self._decay_before = (section.weight_decay, 0)
        """The weight decay, and the version since which; and the one before `_decay_set`."""
        self._decay_set = 0
        self._rates: list[Mapping[int, float]] = []
        self._use(section, groups)

    def set(self, section: TableSection, groups: Mapping[str, int], version: int) -> None:
        """Use other settings from the close of `version` on; past ticks, shrinks and cuts stay.

        Also after a restore of `version`, as the job file may have changed. Of a version the last call counts: after a
        restore the values that were set follow those of the job file.
        """
        if version != self._decay_set:
            self._decay_before, self._decay_set = self._decay, version
        stays = section.weight_decay == self._decay_before[0]
        self._decay = self._decay_before if stays else (section.weight_decay, version)
        self._use(section, groups)

    def _use(self, section: TableSection, groups: Mapping[str, int]) -> None:
        with self._turn:
            self._groups = dict(groups)
            self._classes: SlotClasses = classes_of(section, groups)
            self._nonclk, self._clk = np.float32(section.nonclk_coeff), np.float32(section.click_coeff)
            self._arrange()

    # --- events ------------------------------------------------------------------------------------------------------

    def tick(self, day: int) -> None:
        """Advance to `day`, one tick a day, each at the present rates."""
        with self._turn:
            sections = self._classes
            rates = {TABLE: sections.sections[0].decay} | {g: sections.section_of(g).decay for g in sections.groups}
            rates = {g: rate for g, rate in rates.items() if g == TABLE or rate != rates[TABLE]}
            self._rates += [rates] * max(0, day - self.day)
            self._arrange()  # before the day is set: a reader of the day needs the rates up to it
            self.day = max(day, self.day)

    def ruled(self, shrink: ShrinkRows, version: int) -> AppliedShrink:
        """The rules by which `shrink` acts at `version`, resolved for each slot group."""
        chosen = {TABLE: self._classes.sections[0]}
        chosen |= {group: self._classes.section_of(group) for group in self._classes.groups}
        named = shrink.delete_below is not None or shrink.delete_after_days is not None
        below = {g: shrink.delete_below if named else own.delete_below for g, own in chosen.items()}
        after = {g: shrink.delete_after_days if named else own.delete_after_days for g, own in chosen.items()}
        return AppliedShrink(version, self.day, below, after)

    def shrink(self, shrink: ShrinkRows, version: int) -> None:
        """From here on rows that meet the rule are absent."""
        self._shrink(self.ruled(shrink, version))

    def clear(self, group: int, version: int) -> None:
        """From here on all rows of a slot group are absent: their scores are below any."""
        self._shrink(AppliedShrink(version, self.day, {TABLE: None, group: MAX_FLOAT32}, {TABLE: None}))

    def freeze(self, group: int) -> None:
        """From here on the rows of a slot group do not learn."""
        self.frozen_groups |= {group}

    def unfreeze(self, group: int, version: int) -> None:
        """From here on they learn again."""
        if group in self.frozen_groups:
            self.frozen_groups -= {group}
            self._thaw({**self._thawed, group: version})

    def _thaw(self, thawed: Mapping[int, int]) -> None:
        self._thawed, self._thawed_G = thawed, np.zeros(NUM_GROUPS, np.uint32) if thawed else None
        if self._thawed_G is not None:
            self._thawed_G[list(thawed)] = list(thawed.values())

    def _shrink(self, applied: AppliedShrink) -> None:
        with self._turn:
            shrinks = (*self.shrinks, applied)
            self._arrange(shrinks)  # before `shrinks` is set: a sweeper that reads it needs the rules
            self.shrinks = shrinks

    def swept(self, seen: Sequence[AppliedShrink]) -> None:
        """Drop the shrinks that were in `shrinks` when a sweep began: all their rows are removed."""
        with self._turn:
            self.shrinks = tuple(shrunk for shrunk in self.shrinks if all(shrunk is not each for each in seen))
            self._arrange()

    def cut(self, cut: ExportCut, version: int) -> None:
        """Clear the delta score of the rows that an export selects."""
        with self._turn:
            whole = (
                cut.since == 0 and cut.base_threshold == 0 and cut.delta_threshold == 0 and cut.delta_keep_days is None
            )
            own = AppliedCut(version, self.day, cut.since, cut.base_threshold, cut.delta_threshold, cut.delta_keep_days)
            self._cuts = (*(() if whole else self._cuts), own)
            self._arrange()

    # --- commits -----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> AgingState:
        """The state, for a commit's part."""
        rates = [(len(list(run)), each) for each, run in groupby(self._rates)]
        frozen, decay = tuple(sorted(self.frozen_groups)), self._decay if self._decay[0] else None
        return AgingState(self.day, rates, list(self.shrinks), list(self._cuts), frozen, dict(self._thawed), decay)

    def load(self, states: Sequence[AgingState]) -> None:
        """Go on from the parts of a commit. They agree, except that some have swept more shrinks than others."""
        with self._turn:
            of_version: dict[int, list[AppliedShrink]] = {}  # of the part that has swept the fewest of a version
            for state in states:
                self.day = state.day
                self._rates = [rates for count, rates in state.rates for _ in range(count)]
                self._cuts, self.frozen_groups = tuple(state.cuts), frozenset(state.frozen_groups)
                self._thaw(state.thawed)
                self._decay, self._decay_set = state.weight_decay or (0.0, 0), NEVER
                for version, run in groupby(state.shrinks, lambda each: each.version):
                    of_version[version] = max(of_version.get(version, []), list(run), key=len)
            if states:
                self.shrinks = tuple(shrunk for version in sorted(of_version) for shrunk in of_version[version])
            self._arrange()

    @classmethod
    def of(cls, section: TableSection, groups: Mapping[str, int], state: AgingState | None) -> "TableAging":
        """From the state in a commit's part; None starts empty."""
        life = cls(section, groups)
        life.load([] if state is None else [state])
        return life

    def _arrange(self, shrinks: Sequence[AppliedShrink] | None = None) -> None:
        """Build the arrays for kernels, with `shrinks` in place of `self.shrinks` if given."""
        shrinks = self.shrinks if shrinks is None else shrinks
        used = {g for rates in self._rates for g in rates} | {g for s in shrinks for g in (*s.below, *s.after)}
        columns = [TABLE, *sorted({*used, *self._classes.groups} - {TABLE})]
        column_G = np.zeros(NUM_GROUPS, np.uint16)
        column_G[columns[1:]] = np.arange(1, len(columns))
        rates_TK = np.array([[r.get(g, r[TABLE]) for g in columns] for r in self._rates], np.float32)
        versions = [[t.version, t.since] for t in self._cuts]
        days = [[t.day, NEVER if (keep := t.delta_keep_days) is None else keep] for t in self._cuts]
        thresholds = [[_least(t.base_threshold), _least(t.delta_threshold)] for t in self._cuts]
        self._arrays = AgingArrays(
            DayRates(column_G, rates_TK.reshape(len(self._rates), len(columns))),
            _rules_of(shrinks, columns),
            CutRules(
                np.array(versions, np.uint32).reshape(-1, 2),
                np.array(days, np.int32).reshape(-1, 2),
                np.array(thresholds, np.float32).reshape(-1, 2),
            ),
            tuple(columns),
        )

    # --- what rows owe ------------------------------------------------------------------------------------------------

    def owing_since(self, group_U: NDArray[np.uint16]) -> U32 | np.uint32:
        """(U,) or one for all: the version of the close before which rows of these slot groups owe no weight decay."""
        since = np.uint32(self._decay[1])
        return since if self._thawed_G is None else np.maximum(since, self._thawed_G[group_U])

    # --- present values of rows --------------------------------------------------------------------------------------

    def bring(self, statistics: RowStatistics, rows_U: I32, version: int) -> None:
        """Before a push of `version`: bring rows that its pass has not pushed yet up to today."""
        days, _, clears, _ = self._arrays
        if len(days.rates_TK) or len(clears.versions_X2):
            bring(statistics, rows_U, np.uint32(version), self.day, days, clears, self._nonclk, self._clk)

    def close(self, statistics: RowStatistics, touched_U: I32, before: int) -> None:
        """At a close, after its ticks: bring the touched rows from day `before` to today."""
        close(statistics, touched_U, before, self.day, self._arrays.days)

    def gone(self, statistics: RowStatistics, rows_U: I32, also: AppliedShrink | None = None) -> U8:
        """(U,) why each row is absent, or STAYS. With `also`, only that shrink decides. Reserved rows stay."""
        days, rules, _, columns = self._arrays
        if also is not None:
            rules = _rules_of([also], columns)
        why_U = np.zeros(len(rows_U), np.uint8)
        if len(rules.version_S):
            gone(statistics, rows_U, days, rules, self._nonclk, self._clk, why_U)
        return why_U

    def absent(self, words_UW: U32) -> NDArray[np.bool_]:
        """(U,) whether rows read from a store are absent."""
        if not self.shrinks:
            return np.zeros(len(words_UW), np.bool_)
        absent_U: NDArray[np.bool_] = self.gone(RowStatistics.of_words(words_UW), _all(words_UW)) != STAYS
        return absent_U

    def score(self, words_UW: U32) -> F32:
        """(U,) scores now."""
        statistics, score_U = RowStatistics.of_words(words_UW), np.empty(len(words_UW), np.float32)
        scores(statistics, _all(words_UW), self.day, self._arrays.days, self._nonclk, self._clk, score_U)
        return score_U

    def present(self, statistics: RowStatistics) -> F32:
        """(U, 2) shows and clicks now."""
        value_U2 = np.empty((len(statistics.show), 2), np.float32)
        present(statistics, self.day, self._arrays.days, value_U2)
        return value_U2

    def rates_of(self, group: int) -> list[float]:
        """The rate of each day up to now, of a slot group."""
        with self._turn:
            return [rates.get(group, rates[TABLE]) for rates in self._rates]

    def unseen(self, words_UW: U32) -> NDArray[np.int64]:
        """(U,) days since rows were seen."""
        return self.day - RowStatistics.of_words(words_UW).last_seen_day.astype(np.int64)

    def delta_score(self, words_UW: U32, version: int | None = None) -> F32:
        """(U,) delta scores now, or, with `version`, before the cut of that version."""
        statistics, (days, _, clears, _) = RowStatistics.of_words(words_UW), self._arrays
        if version is not None:
            early = clears.versions_X2[:, 0] < version
            clears = CutRules(clears.versions_X2[early], clears.days_X2[early], clears.thresholds_X2[early])
        cleared_U = np.zeros(len(words_UW), np.bool_)
        cleared_of(statistics, _all(words_UW), days, clears, self._nonclk, self._clk, cleared_U)
        return np.where(cleared_U, np.float32(0), statistics.delta_score)

    def selected(self, words_UW: U32, cut: ExportCut, version: int) -> NDArray[np.bool_]:
        """(U,) whether the export cut at `version`, the present one, selects each row."""
        selected_U: NDArray[np.bool_] = (words_UW[:, 1] > cut.since) & (self.kept_back(words_UW, cut, version) == 0)
        return selected_U

    def kept_back(self, words_UW: U32, cut: ExportCut, version: int) -> U8:
        """(U,) which threshold of the export cut at `version`, the present one, keeps each row out: 0 for none, or
        1 + its index in KEEPERS; the first if several do."""
        by_U = np.zeros(len(words_UW), np.uint8)
        if cut.delta_threshold > 0:
            by_U[~(self.delta_score(words_UW, version) >= np.float32(cut.delta_threshold))] = 3
        if cut.delta_keep_days is not None:
            by_U[self.unseen(words_UW) > cut.delta_keep_days] = 2
        by_U[~(self.score(words_UW) >= _least(cut.base_threshold))] = 1
        return by_U

    def leaves_after(self, words_W: U32, max_days: int = 3660) -> int | None:
        """Days until a row that is not seen again meets the present rule; None: not within `max_days`."""
        rule = self.ruled(ShrinkRows(table=""), 0)
        days, _, _, columns = self._arrays
        group = columns[int(days.column_G[int(words_W[0] & 0xFFFF)])]
        below, after = rule.below.get(group, rule.below[TABLE]), rule.after.get(group, rule.after[TABLE])
        section = self._classes.sections[0] if group == TABLE else self._classes.section_of(group)
        rate = np.float32(section.decay)
        score, unseen = self.score(words_W[None])[0], int(self.unseen(words_W[None])[0])
        for later in range(max_days + 1):
            if (below is not None and score < np.float32(below)) or (after is not None and unseen + later > after):
                return later
            score *= rate
        return None


class DayRates(NamedTuple):
    """Decay rates of ticks: tick t leads from day t to day t + 1."""

    column_G: NDArray[np.uint16]
    rates_TK: F32


class ShrinkRules(NamedTuple):
    """The rules of the shrinks in force, as arrays."""

    version_S: U32
    day_S: I32
    below_SK: F32
    after_SK: I32


class CutRules(NamedTuple):
    """Cuts: version and since; day and days kept; thresholds of score and delta score."""

    versions_X2: U32
    days_X2: I32
    thresholds_X2: F32


class AgingArrays(NamedTuple):
    """A consistent set of the arrays above."""

    days: DayRates
    rules: ShrinkRules
    clears: CutRules
    columns: tuple[int, ...]
    """Slot group of each column."""


def _rules_of(shrinks: Sequence[AppliedShrink], columns: Sequence[int]) -> ShrinkRules:
    """The rules of shrinks, as arrays."""

    def limit(limits: Mapping[int, Any], group: int, none: float) -> float:
        value = limits.get(group, limits[TABLE])
        return none if value is None else value

    below_SK = [[limit(s.below, g, -np.inf) for g in columns] for s in shrinks]
    after_SK = [[limit(s.after, g, NEVER) for g in columns] for s in shrinks]
    shape = (len(shrinks), len(columns))
    return ShrinkRules(
        np.array([s.version for s in shrinks], np.uint32),
        np.array([s.day for s in shrinks], np.int32),
        np.array(below_SK, np.float32).reshape(shape),
        np.array(after_SK, np.int32).reshape(shape),
    )


def _least(threshold: float) -> np.float32:
    """The lowest score that passes. A threshold of 0 is none: negative scores pass, too."""
    return np.float32(threshold if threshold > 0 else -np.inf)


def _all(words_UW: U32) -> I32:
    return np.arange(len(words_UW), dtype=np.int32)


@njit(nogil=True, cache=True)
def _decayed(value, begin, end, column, rates_TK):  # type: ignore[no-untyped-def]
    """A show or click as of day `begin`, decayed to day `end`."""
    for day in range(begin, end):
        value = value * rates_TK[day, column]
    return value


@njit(nogil=True, cache=True)
def _score(statistics, row, day, days, nonclk, clk):  # type: ignore[no-untyped-def]
    """The score of a row on a day: semantics of rows; source: Paddle's CTR accessor."""
    column = days.column_G[statistics.group[row]]
    seen = statistics.last_seen_day[row]
    show = _decayed(statistics.show[row], seen, day, column, days.rates_TK)
    click = _decayed(statistics.click[row], seen, day, column, days.rates_TK)
    return (show - click) * nonclk + click * clk


@njit(nogil=True, cache=True)
def _cleared(statistics, row, days, clears, nonclk, clk):  # type: ignore[no-untyped-def]
    """Whether a cut after the row's last push selected it."""
    changed, delta = statistics.changed_version[row], statistics.delta_score[row]
    for x in range(len(clears.versions_X2) - 1, -1, -1):
        if clears.versions_X2[x, 0] < changed:
            return False
        if changed <= clears.versions_X2[x, 1] or delta < clears.thresholds_X2[x, 1]:
            continue
        day, keep = clears.days_X2[x, 0], clears.days_X2[x, 1]
        if keep >= 0 and day - statistics.last_seen_day[row] > keep:
            continue
        if _score(statistics, row, day, days, nonclk, clk) >= clears.thresholds_X2[x, 0]:
            return True
    return False


@njit(nogil=True, cache=True)
def bring(statistics, rows_U, version, day, days, clears, nonclk, clk):  # type: ignore[no-untyped-def]
    """Bring show, click and delta score of rows last pushed before `version` up to `day`."""
    for u in range(len(rows_U)):
        row = np.uint32(rows_U[u])
        changed = statistics.changed_version[row]
        if changed == 0 or changed == version:
            continue
        if len(clears.versions_X2) and _cleared(statistics, row, days, clears, nonclk, clk):
            statistics.delta_score[row] = np.float32(0)
        seen, column = statistics.last_seen_day[row], days.column_G[statistics.group[row]]
        if seen < day:
            statistics.show[row] = _decayed(statistics.show[row], seen, day, column, days.rates_TK)
            statistics.click[row] = _decayed(statistics.click[row], seen, day, column, days.rates_TK)


@njit(nogil=True, cache=True)
def close(statistics, rows_U, before, day, days):  # type: ignore[no-untyped-def]
    """Bring rows as of day `before` to `day`."""
    for u in range(len(rows_U)):
        row = np.uint32(rows_U[u])
        if before < day:
            column = days.column_G[statistics.group[row]]
            statistics.show[row] = _decayed(statistics.show[row], before, day, column, days.rates_TK)
            statistics.click[row] = _decayed(statistics.click[row], before, day, column, days.rates_TK)
        statistics.last_seen_day[row] = day


@njit(nogil=True, cache=True)
def gone(statistics, rows_U, days, rules, nonclk, clk, why_U):  # type: ignore[no-untyped-def]
    """Write why each row is absent: BELOW or UNSEEN; STAYS if it is not."""
    for u in range(len(rows_U)):
        row = np.uint32(rows_U[u])
        changed = statistics.changed_version[row]
        why_U[u] = STAYS
        if changed == 0:
            continue
        column = days.column_G[statistics.group[row]]
        for s in range(len(rules.version_S)):
            if changed > rules.version_S[s]:
                continue
            below, after = rules.below_SK[s, column], rules.after_SK[s, column]
            if below > 0 and _score(statistics, row, rules.day_S[s], days, nonclk, clk) < below:
                why_U[u] = BELOW
                break
            if after >= 0 and rules.day_S[s] - statistics.last_seen_day[row] > after:
                why_U[u] = UNSEEN
                break


@njit(nogil=True, cache=True)
def scores(statistics, rows_U, day, days, nonclk, clk, score_U):  # type: ignore[no-untyped-def]
    """Write the score of rows on `day`."""
    for u in range(len(rows_U)):
        score_U[u] = _score(statistics, np.uint32(rows_U[u]), day, days, nonclk, clk)


@njit(nogil=True, cache=True)
def present(statistics, day, days, value_U2):  # type: ignore[no-untyped-def]
    """Write shows and clicks on `day`."""
    for u in range(len(value_U2)):
        seen, column = statistics.last_seen_day[u], days.column_G[statistics.group[u]]
        value_U2[u, 0] = _decayed(statistics.show[u], seen, day, column, days.rates_TK)
        value_U2[u, 1] = _decayed(statistics.click[u], seen, day, column, days.rates_TK)


@njit(nogil=True, cache=True)
def cleared_of(statistics, rows_U, days, clears, nonclk, clk, cleared_U):  # type: ignore[no-untyped-def]
    """Write whether cuts cleared the delta score of rows."""
    for u in range(len(rows_U)):
        cleared_U[u] = _cleared(statistics, np.uint32(rows_U[u]), days, clears, nonclk, clk)
