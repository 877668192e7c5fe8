"""Foundations of every other room: errors, retries, texts, timing, types of columns."""
