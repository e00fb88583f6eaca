"""Stores: where a history lives. `base` is the protocol, `objects` every store that obstore can open."""
