"""Loading ahead: worker processes that compute elements by number, and the shared memory that
carries the elements back."""
