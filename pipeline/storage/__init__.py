"""One output on any filesystem: the grammar of its paths, whole-file writes and creations, the JSON
and small tables that lie there.

It may import `common`.
"""
