"""The corpus machine: sources, plan, workers, commits, readers; each a folder, lower ones first in
`common`, `storage`, `audio`, `spec`, `formats` and `sources`, `planning`, `dataset`, `reader` and
`worker`, `driver`, `operations`. It may import `amtcore`, never `earmill.jobs`; users import from `earmill`.
"""
