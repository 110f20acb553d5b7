"""Costs of items: FLOPs of every layer of every phase, and the file of measured times."""
