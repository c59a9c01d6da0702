"""Makes untrusted text safe for a terminal: no character moves the cursor or changes colours.

Text of generators, workers, services and files is passed through here before it is shown. Also the plural of nouns.
"""

import re
import sys
from typing import TextIO

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, C1 ones too, but tab and line feed
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # line and paragraph separators, changes of direction
    "\ud800-\udfff]"  # surrogates, which cannot be encoded
)


def printable(text: str) -> str:
    """`text` with each control character escaped, as in \\x1b; tabs and line feeds stay."""
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


def counted(number: int, noun: str) -> str:
    """Such as "1 worker", "2 workers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def print_printable(*texts: object, file: TextIO | None = None, sep: str = " ", flush: bool = False) -> None:
    """As print, for untrusted text. Text and line end are one write, so lines of several threads do not mix."""
    line = sep.join(printable(str(text)) for text in texts)
    print(f"{line}\n", end="", file=file or sys.stdout, flush=flush)
