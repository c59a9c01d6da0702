"""Hot loop on shows and clicks of rows: what each row had before each question, in the order of the log.

Shapes: Q questions in order, U keys; 2: shows, clicks.
"""

from collections.abc import Sequence

from headrace.kernel_cache import njit


@njit(nogil=True, cache=True)
def accumulate(number_Q, event_Q, added_Q2, counts_U, value_U2, answer_Q2):  # type: ignore[no-untyped-def]
    """Write the shows and clicks before each question to `answer_Q2`; add its own to `value_U2`.

    `number_Q`: the key of each question, by its place in `value_U2`. Questions of one event see nothing of it. Nothing
    is added to a key that does not count (`counts_U`).
    """
    begin = 0
    while begin < len(number_Q):
        end = begin
        while end < len(number_Q) and event_Q[end] == event_Q[begin]:
            for k in range(2):
                answer_Q2[end, k] = value_U2[number_Q[end], k]
            end += 1
        for q in range(begin, end):
            for k in range(2 if counts_U[number_Q[q]] else 0):
                value_U2[number_Q[q], k] += added_Q2[q, k]
        begin = end


def accumulate_reference(
    questions: Sequence[tuple[int, int, tuple[float, float]]], counts: set[int], known: dict[int, tuple[float, float]]
) -> list[tuple[float, float]]:
    """The twin: questions are (key, event, shows and clicks); `counts` has the keys that count, `known` is extended."""
    answers = []
    for place, (key, event, _) in enumerate(questions):
        answers.append(known.get(key, (0.0, 0.0)))
        if place + 1 == len(questions) or questions[place + 1][1] != event:
            for other, same, (show, click) in questions:
                if same == event and other in counts:
                    before = known.get(other, (0.0, 0.0))
                    known[other] = before[0] + show, before[1] + click
    return answers
