"""The trainer of a policy: batches in, versions out."""
