"""The integrate-and-fire layer: leak, attributes, checks, files and exchange format.

It may import what `stages` may.
"""
