"""Loading ahead: worker processes that compute elements by number, and the memory that brings them
over."""
