"""From the config to a run that is ready to train: data and model, sizes, compiled programs."""
