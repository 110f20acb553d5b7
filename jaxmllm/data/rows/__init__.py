"""The rows of a step: what a plan places on this host, as arrays of fixed shape with their
attention masks."""
