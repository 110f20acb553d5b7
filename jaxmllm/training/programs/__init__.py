"""The compiled programs of a run: what all kinds of them share, one kind that runs phase by phase,
one that runs in pipeline stages, and the transfer of rows to the devices."""
