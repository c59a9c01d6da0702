"""Which sign a person means by a value of a slot."""

import re

from dataset.schema import Schema
from millrace.errors import SpecError
from millrace.keys import sign_of_text
from millrace.mistakes import nearest
from service.spec import Job


def sign_of(spec: Job, slot: str, value: str) -> int:
    """The sign of `value` in a sparse slot: its number, or its text's hash. Raises SpecError."""
    sparse = {each.name: each.sparse for each in Schema.of(spec.slots).sparse}
    if slot not in sparse:
        raise SpecError(f"there is no sparse slot {slot!r}; {nearest(slot, sparse)}")
    if sparse[slot].values == "string":
        return sign_of_text(value.encode())
    if re.fullmatch(r"[0-9]{1,20}", value) is None or int(value) >= 1 << 64:
        raise SpecError(
            f'{value!r:.100} is no sign of slot {slot!r}, whose values are "uint64": decimal numbers of 64 bits'
        )
    return int(value)
