"""What runs a job: Ray, workers, who does which shard, what to do when one dies, and its events.

It may import every other room of the pipeline but `reader`.
"""
