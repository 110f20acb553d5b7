"""Sources of records and media: the protocol, one file per format, and the table of formats."""
