"""Where records and their media come from: the protocol, one file per format, and the table of
formats."""
