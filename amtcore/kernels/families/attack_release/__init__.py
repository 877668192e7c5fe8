"""Gain control with two time constants: how loudness builds up and dies away.

It may import `vector` and `over_time`, no other family.
"""
