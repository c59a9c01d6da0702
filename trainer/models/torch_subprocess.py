"""Questions about a job's model, answered by a subprocess that has torch: the control plane has not.

A module that answers them is a program that calls `reply`: it reads a JSON object from standard input, and prints
another as its last line.
"""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from headrace import documents, process
from headrace.deadline import Deadline
from headrace.errors import HeadraceError, SpecError
from headrace.extras import require
from headrace.printable import printable

ANSWER_S = 300.0
"""Longest time to build the model and answer."""
MAX_SHOWN = 2000
"""The message of a failure repeats so many of the last characters of standard error."""


def answer_of(module: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of `python -m module`.

    Raises SpecError where it is {"error": ...} or torch is not installed, HeadraceError where none came.
    """
    require("torch", "the job's model")
    command, text = [sys.executable, "-P", "-m", module], json.dumps(question, default=str)
    try:
        finished = process.run(command, deadline=Deadline.after(ANSWER_S), data=text.encode())
    except OSError as error:
        raise HeadraceError(f"the model cannot be inspected: {error}") from error
    if finished.code is None:
        raise HeadraceError(f"the model cannot be inspected: no answer within {ANSWER_S:g} s")
    try:
        answer = documents.parse_object(finished.output.decode().splitlines()[-1], "the answer")
    except (ValueError, IndexError) as error:
        errors = printable(finished.errors.decode("utf-8", "replace")[-MAX_SHOWN:].strip())
        raise HeadraceError(
            f"the model cannot be inspected: exit code {finished.code}; its errors: {errors}"
        ) from error
    if "error" in answer:
        raise SpecError(answer["error"])
    return answer


def reply(work: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Answer the question of `answer_of` with what `work` makes of it, or with the error that it raises."""
    question = documents.parse_object(sys.stdin.buffer.read(), "the question")
    try:
        answer = work(question)
    except HeadraceError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))
