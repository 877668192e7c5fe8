"""The membrane of an inner hair cell: a conductance that follows the input, and a leaky charge.

It may import `vector` and `over_time`, no other family.
"""
