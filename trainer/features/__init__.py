"""From feature ids to model inputs and back: unique keys, pooling, batches."""
