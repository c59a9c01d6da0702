"""The shards as a trainer calls them when they are processes."""
