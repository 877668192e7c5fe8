"""One output on any store: grammar of its paths, backends, JSON documents and small tables."""
