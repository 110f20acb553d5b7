"""What a cluster takes for a run before there is one: seconds, bytes sent and bytes held."""
