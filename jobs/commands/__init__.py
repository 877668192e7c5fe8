"""Commands by subject. They import heavy modules when they run, so that `--help` is quick."""
