"""PULSESync: the publisher on the trainer's side, the subscriber on the rollout workers' side."""
