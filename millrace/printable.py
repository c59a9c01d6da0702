"""Text that others made, as a terminal may be given it: no character of it moves the cursor or changes colours.

Generators, workers, services and files of others say what they like; where their words are shown, they come through
here.
"""

import re
import sys
from typing import TextIO

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, C1 ones too, but tab and line feed
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # ends of lines and paragraphs, turns of the direction
    "\ud800-\udfff]"  # halves of characters, which no terminal can be sent
)


def printable(text: str) -> str:
    """`text` with each character that a terminal would act on written out, as in \\x1b; tabs and line feeds stay."""
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


def say(*texts: object, file: TextIO | None = None, sep: str = " ", flush: bool = False) -> None:
    """As print, for words of others."""
    print(*(printable(str(text)) for text in texts), sep=sep, file=file or sys.stdout, flush=flush)
