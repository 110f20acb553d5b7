"""The plan of a pipelined step: microbatches that cost the same in every phase, their rows, and the
schedule of each run of the executor."""
