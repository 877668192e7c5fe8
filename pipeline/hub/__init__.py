"""Finished datasets on the Hugging Face hub: which files go there, and how they get there.

It may import `dataset` and what is below it, never a driver, worker or reader.
"""
