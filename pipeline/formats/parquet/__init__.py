"""Parquet: one file a shard, one row a clip, row groups sized for random access or for scans.

It may import what `formats` may, and the modules beside it.
"""
