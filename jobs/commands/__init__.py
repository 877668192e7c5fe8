"""One module a command. Commands import heavy modules when they run, so that `--help` is quick."""
