"""Training on copies of rows: asynchronous, with one push for several batches of a rank.

A rank learns on a copy of its own and pushes what it has learnt every `train.k_steps` batches, and with the last batch
of a pass (trainer.train.exchanges). To a shard such a push is like any other: it is applied when it comes.
"""

from headrace.pserver.consistency.asynchronous import Async


class Geo(Async):
    name = "geo"
