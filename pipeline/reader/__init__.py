"""A stored dataset as rows: by number, by id, and as slices in seconds. Models and torch are
imported when they are needed."""
