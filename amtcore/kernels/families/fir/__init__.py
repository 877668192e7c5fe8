"""Finite impulse responses: ear filters and decimation. Their state is the input they need.

It may import `vector` and `over_time`, no other family.
"""
