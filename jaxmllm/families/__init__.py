"""Published model folders: config.json and tensors in the project's words, one file per family."""
