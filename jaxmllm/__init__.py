"""Training of multimodal large language models on JAX, planned on the host, compiled once."""
