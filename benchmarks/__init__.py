"""Scripts that measure speed and write what they measured into RESULTS.md."""
