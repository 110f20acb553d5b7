"""The fixed sizes of a run, chosen once from sampled batches: of rows, pools and the exchange."""
