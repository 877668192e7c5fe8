"""Models that are no auditory ones, for a baseline beside them: mel spectra, modules of others.

They may import `features` and what is below it, are registered as those of any other distribution
are (pyproject.toml, group `amtcore.models`), and nothing imports them by name.
"""
