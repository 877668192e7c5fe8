"""The pipeline: sources, plan, workers, commits, readers; each room is a folder.

From the lowest room up: `common`, `storage`, `audio`, `spec`, `formats` and `sources`, `planning`,
`dataset` and `loader`, `worker`, `reader` and `hub`, `driver`, `operations`. It may import
`amtcore`, never `earmill.jobs`; users import from `earmill`.
"""
