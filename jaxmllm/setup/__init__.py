"""From the config to a run that is ready to train: data and model, sizes, compiled programs.

The only room that reads the whole config."""
