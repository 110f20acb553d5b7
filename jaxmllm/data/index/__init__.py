"""The length index of a source: how long every example is in every phase, built once and cached."""
