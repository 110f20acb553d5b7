"""The commands, one file each, and what they share; only `__main__.py` and benchmarks import
them."""
