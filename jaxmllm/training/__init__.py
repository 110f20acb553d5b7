"""Training a model that setup/ has built: the loop, its step functions and programs, its reports
and the folder of a run."""
