"""The fixed sizes of a run, chosen once from sampled batches: row capacities, segments, pools and pair slots."""
