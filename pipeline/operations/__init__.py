"""Operations of a user on a dataset, one module each: run_job, update, retry, add_features, ...

Imports driver and every room below it, except reader, loader and hub.
"""
