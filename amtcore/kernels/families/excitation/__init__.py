"""Excitation patterns from intensities, when no gradient is asked for: the level per ERB that sets
the slopes, and the two skirts of the ear's filters; float32.

It may import `vector`, no other family.
"""
