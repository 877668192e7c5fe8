"""Whether auditory features help a small network to tell spoken words in noise: docs/proof.md."""
