"""The rollout side: a version is fetched, proved against live weights or in files, and then written."""
