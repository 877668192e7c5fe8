"""A worker process: fetch, decode, extract, write and commit, shard after shard.

It may import everything below it, but neither `reader` nor `driver`.
"""
