"""The length index of a source: every example's length in every phase, built once and cached."""
