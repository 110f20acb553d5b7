"""Experts of a mixture: the kernels that compute one device's experts, and the exchange of tokens
between devices."""
