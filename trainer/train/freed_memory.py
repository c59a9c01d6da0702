"""Freed memory that the C library keeps for the next step of a trainer."""

import ctypes


def keep_freed_memory() -> None:
    """Have the C library keep freed memory for the next step, so that its pages are not faulted in again.

    Without this, several MB are returned to the system and requested again in each step. glibc only: in its malloc.h
    M_TRIM_THRESHOLD is -1 and M_MMAP_THRESHOLD is -3, of which the largest allowed value is 32 MiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-1, 1 << 30)
        mallopt(-3, 32 << 20)
