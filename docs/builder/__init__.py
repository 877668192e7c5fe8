"""Build the documentation site with mkdocs, mkdocs-material, mkdocstrings, and `hooks`.

`make docs` writes the site to build/site. earmill's models draw the figures (`figures`), and
notebooks are made from the pages of tutorials (`notebooks`).
"""
