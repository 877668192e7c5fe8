"""Parquet: one file a shard, one row a clip, row groups sized for random access or for scans."""
