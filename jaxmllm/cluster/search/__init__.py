"""Which layout a run should have on a cluster: the search of `jaxmllm plan`."""
