"""Messages of the Open Inference Protocol over gRPC. `headrace.proto.generate` generates the Python files."""
