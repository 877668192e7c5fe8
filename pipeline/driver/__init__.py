"""Scheduling of a job: its shards, workers, executors and events.

It may import every room of the pipeline below it, but not `reader`.
"""
