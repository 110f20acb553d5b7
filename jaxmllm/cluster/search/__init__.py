"""The search of `jaxmllm plan` for the layout that a run should have on a cluster."""
