"""The executor: one compiled program that runs any schedule table."""
