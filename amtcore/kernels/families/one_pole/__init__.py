"""Cascades of one complex one-pole section: gammatone and modulation filters."""
