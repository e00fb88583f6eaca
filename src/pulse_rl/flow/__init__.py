"""The run as a dataflow: several policies, workflows of many turns, and workers that come and go."""
