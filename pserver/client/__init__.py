"""The shards as a trainer calls them over gRPC."""
