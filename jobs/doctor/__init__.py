"""What this machine has and whether it works: checks, each of which goes on when another fails."""
