"""The kinds of sources: files, Kafka, a simulated stream."""
