"""The plan of a step, from the lengths of its batch alone: where every item is computed, and the
way of every token."""
