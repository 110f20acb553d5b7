"""The data of a run: sources of records, their media, text and length index, and rows of steps.

Nothing here imports jax, so that worker processes stay light.
"""
