"""What items cost: FLOPs of every layer of every phase, and the file of measured times."""
