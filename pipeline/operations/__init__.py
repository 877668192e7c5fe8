"""Operations of a user on a dataset, one module each: run_job, update, retry, add_features, ..."""
