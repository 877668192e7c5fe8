"""Real first- and second-order sections: hair-cell low-passes and slow modulation filters.

It may import `vector` and `over_time`, no other family.
"""
