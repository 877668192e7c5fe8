"""Formats of data files: rows become files, and files become frames again."""
