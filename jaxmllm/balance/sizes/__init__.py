"""The fixed sizes of rows, pools and the exchange, chosen once per run from sampled batches."""
