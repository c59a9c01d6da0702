"""Seeds: every random choice has one, derived from the job's seed and from its purpose."""

import hashlib


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, for example `derive(seed, "dropout", pass_number, rank)`."""
    text = "/".join([str(seed), *(str(part) for part in purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
