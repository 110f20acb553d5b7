"""The config of a run: schema.py says which keys there are, read.py reads YAML and overrides into it
and writes it back."""
