"""Messages of the kernel's gRPC services; the `*_pb2*` files are made by `python -m millrace.proto.generate`."""
