"""The rows of one phase: how many of each class, their items, and the ranks that compute them."""
