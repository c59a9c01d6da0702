"""Tables on one shard: rows found, learnt, aged, swept and handed over."""
