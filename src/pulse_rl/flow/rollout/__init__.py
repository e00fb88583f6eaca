"""Rollout workers: they follow the histories of policies, and sample for the workflows that they play."""
