"""Lower skirts of the ear's filters, whose slope depends on the level of what they pass.

No recurrence over time, but the one part of an excitation pattern that is no matrix product; it
has the same four files.

It may import `vector` and `over_time`, no other family.
"""
