"""Frequency and loudness scales: ERB number, Cam, phon.

It may import `amtcore.units`, `amtcore.tables` and what these may.
"""
