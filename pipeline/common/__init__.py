"""What every other room needs: errors, retries, texts, timing, types of columns.

It may import no other room of the pipeline.
"""
