"""A worker process: fetch, decode, extract, write and commit, shard after shard."""
