"""The plan of a step, made from the lengths of its batch alone: where every item is computed, and
the route of every token."""
