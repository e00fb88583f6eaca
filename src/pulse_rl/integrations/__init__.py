"""One file a framework, each imported by who uses that framework."""
