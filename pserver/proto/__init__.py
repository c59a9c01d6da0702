"""Messages between trainers and shards. `headrace.proto.generate` generates the Python files from the protos."""
