"""The dataset in an output: description, commits, snapshots, cards, checks and repairs."""
