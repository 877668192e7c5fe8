"""Foundations of every other room: errors, retries, texts, timing, types of columns.

It may import no other room of the pipeline.
"""
