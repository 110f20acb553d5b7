"""The foundations of a run, whatever it trains: processes, signals, checkpoints, files, locks,
metrics, clocks.

Of the other rooms it imports only the config.
"""
