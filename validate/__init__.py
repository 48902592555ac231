"""Check a shard set against the adapter it was made from."""
