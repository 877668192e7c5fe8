"""Gain control with two time constants: how loudness builds up and dies away."""
