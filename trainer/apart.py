"""Questions about a job's model, asked of a process that has torch: the control plane has not.

A module that answers them is a program of its own: a JSON object on its standard input, another as its last line.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from millrace import documents
from millrace.errors import MillraceError, SpecError

ASK_S = 300.0
"""How long building the model may take."""


def answer_of(module: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What `python -m module` says. Raises SpecError where that is {"error": ...}."""
    command, text = [sys.executable, "-P", "-m", module], json.dumps(asked, default=str)
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=ASK_S, check=False)
        answer = documents.parse_object(done.stdout.splitlines()[-1], "the answer")
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise MillraceError(f"the model cannot be looked at: {error!r}") from error
    if "error" in answer:
        raise SpecError(answer["error"])
    return answer
