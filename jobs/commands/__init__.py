"""One module a command; each imports what it needs when it runs, so that `--help` is quick.

They may import what `earmill.jobs` may, and the modules beside it.
"""
