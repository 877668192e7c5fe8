"""Which rows there are, cut into shards once and for all, and what computing them will cost."""
