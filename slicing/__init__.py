"""Read adapters, place their modules on ranks, write and read shard sets."""
