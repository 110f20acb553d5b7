"""How encoder outputs reach the ranks of the language phase: where items run so that the way is
short, the rounds of the exchange, and the backends that carry them (tables.py lists those)."""
