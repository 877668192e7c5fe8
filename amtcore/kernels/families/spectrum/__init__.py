"""Running spectra of the loudness models, when no gradient is asked for: windows of several lengths
at one hop from what blocks of a hop have in common; float32.

It may import `vector`, no other family.
"""
