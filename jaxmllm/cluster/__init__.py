"""Predictions of a run on a cluster before it exists: seconds, bytes sent and bytes held."""
