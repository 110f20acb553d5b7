"""The compiled programs of a run: the base of all kinds, one kind that runs phase by phase (and one
that draws so), one that runs in pipeline stages, and the transfer of rows to the devices."""
