"""The config: schema.py says what keys there are, read.py reads YAML and overrides into it and writes it back."""
