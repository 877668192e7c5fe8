"""Finished datasets on the Hugging Face hub: which files go there, and how they get there.

This room imports `dataset` and the rooms below it, never a driver, worker or reader.
"""
