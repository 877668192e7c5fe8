"""Builds the documentation site: mkdocs calls `hooks`, which calls the modules beside it.

`python -m mkdocs build --strict` (or `make docs`) writes it to build/site. What is made while it is
built has one source, which is not copied by hand: pages of other folders (`borrowed_pages`), the
reference of commands and names (`cli_reference`, `python_reference`), tables of figures that the
benchmarks measured (`measured`), and drawings by our own code (`figures`).
"""
