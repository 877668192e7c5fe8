"""The five nonlinear feedback loops of auditory-nerve adaptation.

It may import `vector` and `over_time`, no other family.
"""
