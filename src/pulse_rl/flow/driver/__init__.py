"""The driver of a run: it starts services, watches and replaces them, and shows what they do."""
