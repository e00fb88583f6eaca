"""vLLM follows a history: the plug-in for its servers and workers, and the client for trainers."""
