"""Leaky integrate-and-fire neurons with exponential synapses."""
