"""One output on any store: the grammar of its paths, the backends that read and write its files,
and the JSON and small tables that lie there.

It may import `common`.
"""
