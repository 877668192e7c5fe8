"""Pages in a real browser: `make browser` runs these in headless Chromium, nothing else does."""
