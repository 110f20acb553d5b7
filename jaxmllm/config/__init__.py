"""The config of a run: schema.py defines its keys, read.py reads YAML and overrides into it
and writes it back."""
