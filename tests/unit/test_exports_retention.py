"""Which exports go: never what is needed, and in an order in which what stays can be replayed at any moment."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.exports.pointers import StoredExport, exports_to_remove, is_export


def path(version, kind, timeline=1):
    return f"t{timeline}/{version:010d}-{kind}"


def present(*kinds):
    """B, D: a base, a delta; b, d: one without DONE."""
    kind = {"b": "base", "d": "delta"}
    return [StoredExport(path(n, kind[k.lower()]), k.isupper()) for n, k in enumerate(kinds, 1)]


def gone(text, keep, needed=(), newest=None):
    found = exports_to_remove(
        present(*text), keep, {path(*each) for each in needed}, newest or path(len(text), "delta")
    )
    return [int(each[3:13]) for each in found]


def test_the_newest_bases_stay_with_what_follows_them():
    assert gone("BDDBDBDD", 2) == [3, 2, 1]
    assert gone("BDDBDBDD", 1) == [5, 4, 3, 2, 1]
    assert gone("BDDBDBDD", 3) == []
    assert gone("BDD", 5) == []


def test_what_is_pointed_to_stays_with_its_chain():
    assert gone("BDDBDBDD", 1, needed=[(1, "base"), (2, "delta")]) == [5, 4, 3]


def test_what_is_half_done_goes_unless_it_is_newer():
    assert gone("BdDbD", 5) == [4, 2]
    assert gone("BDb", 5, newest=path(2, "delta")) == []


def test_a_base_that_is_not_complete_does_not_count():
    assert gone("BDb", 1) == [] == gone("BDbD", 1, needed=[(3, "base")])


def test_a_new_timeline_is_newer_whatever_its_versions():
    old, new = StoredExport(path(90, "base", 1), True), StoredExport(path(5, "base", 2), True)
    assert exports_to_remove([old, new], 1, set(), new.path) == [old.path]


def test_only_names_of_exports_are():
    assert is_export("t1/0000000012-base") and is_export("t12/0000000012-delta")
    assert not any(map(is_export, ["t1/0000000012-base.tmp", "x/0000000012-base", "t1/12-base", "current.json"]))


class Chain:
    """Exports made one after the other, each delta on the one before; some fail their gates."""

    def __init__(self, kinds, keep):
        self.there, self.needed, self.parents, self.keep = [], set(), {}, keep
        self.pointed = []
        self.kinds = kinds

    def chain(self, at):
        found = [at]
        while self.parents[found[-1]] is not None:
            found.append(self.parents[found[-1]])
        return found

    def replayable(self):
        return all(
            parent is None or parent in self.there or at not in self.there for at, parent in self.parents.items()
        )

    def run(self):
        last = None
        for version, (is_base, passes) in enumerate(self.kinds, 1):
            base = is_base or last is None
            at = path(version, "base" if base else "delta")
            self.parents[at] = None if base else last
            self.there.append(at)
            last = at
            if passes:
                self.pointed = self.chain(at)
            needed = {*self.chain(at), *self.pointed}
            for each in exports_to_remove([StoredExport(p, True) for p in self.there], self.keep, needed, at):
                assert each not in needed
                self.there.remove(each)
                assert self.replayable(), f"{each} went before what builds on it"
            bases = [p for p in self.there if p.endswith("base")]
            assert len(bases) >= min(self.keep, sum(p.endswith("base") for p in self.parents))


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=30), st.integers(1, 4))
def test_whatever_is_there_can_be_replayed_at_every_moment(kinds, keep):
    Chain(kinds, keep).run()
