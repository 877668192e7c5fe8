"""The job file: its sections, their checks and canonical form, overrides, messages, reference page.

It may import `common`, `storage` and `audio`, whose settings it names.
"""
