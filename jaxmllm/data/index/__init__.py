"""The length index of a source: the length of every example in every phase, built once and
cached."""
