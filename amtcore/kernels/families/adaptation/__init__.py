"""The five nonlinear feedback loops of auditory-nerve adaptation."""
