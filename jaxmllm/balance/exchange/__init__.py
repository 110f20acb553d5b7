"""How encoder outputs reach the ranks of the language phase: the placement of items near their
readers, the rounds of the exchange, and the backends that carry them (listed in tables.py)."""
