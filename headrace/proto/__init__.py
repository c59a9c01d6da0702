"""Messages of the Role service; `python -m headrace.proto.generate` generates the `*_pb2*` files."""
