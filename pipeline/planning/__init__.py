"""The plan of a job: its rows, cut into shards once, and an estimate of its cost."""
