"""Memoryless nonlinearities: the broken stick, the power law and the square."""
