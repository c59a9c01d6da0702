"""Messages between trainers and readers. `headrace.proto.generate` generates the Python files from the protos."""
