"""Checks of a machine; a failed check does not stop the others."""
