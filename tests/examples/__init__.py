"""Programs of examples/, run as a reader of their pages would."""
