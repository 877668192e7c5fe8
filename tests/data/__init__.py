"""Small outputs of earlier releases, and samples of speech."""
