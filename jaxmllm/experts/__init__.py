"""Experts of a mixture: what those of one device compute of the tokens that chose them, and what devices exchange for
it."""
