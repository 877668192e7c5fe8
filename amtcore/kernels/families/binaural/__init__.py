"""Binaural inhibition of specific loudness, when no gradient is asked for; float32.

It may import `vector`, no other family.
"""
