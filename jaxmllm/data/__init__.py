"""The data of a run: sources of records, their media, text and length index, and the rows of each
step.

Nothing here imports jax, so that worker processes stay light.
"""
