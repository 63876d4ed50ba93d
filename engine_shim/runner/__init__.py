"""Runners: ``torch_runner`` runs a model, ``sim_runner`` a timing model (no torch)."""
