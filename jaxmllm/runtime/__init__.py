"""What a run stands on, whatever it trains: processes, signals, checkpoints, files, locks, metrics, clocks.

Knows the config alone.
"""
