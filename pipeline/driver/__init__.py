"""Scheduling of a job: its shards, workers, executors and events."""
