"""Messages between trainers and shards; the Python beside the protos is made by `millrace.proto.generate`."""
