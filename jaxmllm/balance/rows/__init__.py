"""The rows of one phase: how many there are of each class, their items, and their ranks."""
