"""Zarr: one store a shard, one group a stream, frames of all clips end to end in sharded chunks."""
