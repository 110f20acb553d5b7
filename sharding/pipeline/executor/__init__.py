"""The executor: one compiled program that runs any schedule table, and backward passes in two
halves."""
