"""Finite impulse responses: ear filters and decimation. Their state is the input they need."""
