"""The compiled programs of a run: the base of all kinds; the kinds that train phase by phase, draw
phase by phase, and train in pipeline stages; and the transfer of rows to the devices."""
