"""What runs inside a worker process: fetch, decode, extract, write, commit, shard after shard.

It may import everything below it, but neither `reader` nor `driver`.
"""
