"""The rows of one phase: how many of each class, which item lies in which, and which rank computes which."""
