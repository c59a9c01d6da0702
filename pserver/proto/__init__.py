"""Messages between trainers and shards. `millrace.proto.generate` generates the Python files from the protos."""
