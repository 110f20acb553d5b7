"""Launching processes: the local launcher, and templates for Slurm and Kubernetes."""
