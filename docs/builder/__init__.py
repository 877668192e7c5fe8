"""Builds the documentation site: mkdocs with mkdocs-material and mkdocstrings, and `hooks`.

`python -m mkdocs build --strict` (or `make docs`) writes it to build/site. Drawings are made by our
own code (`figures`), notebooks from the pages of tutorials (`notebooks`).
"""
