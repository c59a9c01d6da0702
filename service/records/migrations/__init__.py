"""How the records' tables came to be what they are: Alembic's environment and one module a change.

A change gets a module `versions/v<number>_<what>.py` beside the others, whose `down_revision` is the last one's number.
"""
