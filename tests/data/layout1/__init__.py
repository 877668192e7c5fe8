"""An output of layout version 1."""
