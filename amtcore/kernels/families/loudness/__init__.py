"""What the loudness models compute between their matrix products, when no gradient is asked for:
components to nodes, and excitation to specific loudness; float32.

It may import `vector`, no other family.
"""
