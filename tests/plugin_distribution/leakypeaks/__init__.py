"""A distribution of its own, as strangers write them: one operation, and a model that uses it."""
