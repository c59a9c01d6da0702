"""Messages of the Role service; `python -m millrace.proto.generate` generates the `*_pb2*` files."""
