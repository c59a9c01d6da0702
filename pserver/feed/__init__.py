"""The live feed of a shard: subscribers, messages, and the changes of each table."""
