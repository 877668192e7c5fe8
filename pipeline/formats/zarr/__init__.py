"""Zarr: one store a shard, one group a stream, frames of all clips end to end in sharded chunks.

It may import what `formats` may, and the modules beside it.
"""
