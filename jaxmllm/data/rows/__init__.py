"""The rows of a step: the items that a plan places on this host, as arrays of fixed shape with
their attention masks."""
