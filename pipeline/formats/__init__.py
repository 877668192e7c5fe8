"""How rows become files and files become frames again: what each format writes, promises and reads.

It may import `common`, `storage` and `spec`.
"""
