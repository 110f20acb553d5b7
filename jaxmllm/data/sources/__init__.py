"""Sources of records and their media: the protocol, one file per format, and the table of
formats."""
