"""Words and lines for terminals and logs."""
