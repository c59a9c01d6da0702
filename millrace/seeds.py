"""Every random choice has a seed derived from the job's and from what it is for."""

import hashlib


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, for example `derive(seed, "dropout", pass_number, rank)`."""
    text = "/".join([str(seed), *(str(part) for part in purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
