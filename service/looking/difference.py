"""`millrace diff`: what service.looking.comparing found, in words or as JSON."""

import json
from collections.abc import Iterator

from millrace.printable import say
from service.lines import count
from service.looking.comparing import Counts, Difference, TensorDifference, compare
from service.looking.places import Where


def diff(where: Where, old: str, new: str, top: int, *, as_json: bool) -> bool:
    """Print what differs between two exports, or two commits; whether anything does."""
    with where.states(old, new) as (before, after):
        found = compare(before, after, top)
    if as_json:
        print(json.dumps(found.message(), indent=2))
    else:
        for line in told(found):
            say(line)
    return found.differs


def told(found: Difference) -> Iterator[str]:
    """A difference in lines."""
    if not found.differs:
        rows = sum(table.total("same") for table in found.tables.values())
        yield f"{found.old} and {found.new} are the same: {count(rows)} rows"
        return
    yield f"{found.old} -> {found.new}"
    for name, table in found.tables.items():
        total = Counts(*(table.total(what) for what in ("new", "gone", "changed", "same")))
        yield f"table {name}: {_counts(total)}"
        for slot, counts in sorted(table.by_slot.items()):
            yield f"  slot {slot}: {_counts(counts)}"
        for move in table.moves:
            yield f"  moved {move.distance:.6g}: slot {move.slot}, sign {move.sign}"
    for tensor in found.tensors:
        yield f"dense {_tensor(tensor)}"


def _counts(counts: Counts) -> str:
    return (
        f"{count(counts.new)} new, {count(counts.gone)} gone, {count(counts.changed)} changed, "
        f"{count(counts.same)} the same"
    )


def _tensor(tensor: TensorDifference) -> str:
    if tensor.old is None:
        return f"{tensor.name}: new, of norm {tensor.new:.6g}"
    if tensor.new is None:
        return f"{tensor.name}: gone, was of norm {tensor.old:.6g}"
    how = "of another shape" if tensor.distance is None else f"moved {tensor.distance:.6g}"
    return f"{tensor.name}: {how}; norm {tensor.old:.6g} -> {tensor.new:.6g}"
