"""What every other room needs and nothing else: errors, kinds of outage, one-line texts, retries,
and the types of a corpus's own columns.

It may import no other room of the pipeline.
"""
