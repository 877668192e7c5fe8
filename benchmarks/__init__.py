"""Scripts that measure speed and write what they saw into RESULTS.md."""
