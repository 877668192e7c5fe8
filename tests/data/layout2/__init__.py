"""An output of layout version 2."""
