"""Large classes: a softmax over many items whose weights are divided over the ranks."""
