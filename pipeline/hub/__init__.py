"""Finished datasets on the Hugging Face hub: contents of a repository, and their upload."""
