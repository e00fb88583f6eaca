"""What engines share: where the published tensors live in an engine's memory, and the proof that they do.

    tracing    runs a model's `load_weights` over tensors without data and records what it would copy where
    geometry   such a copy as boxes of the published tensor, each with a strided view of live memory
    views      the map as what a Subscriber takes: published name → tensor, `pulse.Shard` or a list of them
    coverage   whether published tensors make all of the engine's parameters, every element once
    adoption   the proof, before the first write, that this memory holds a version of the history, or the files
    derived    what an engine computed from weights when it loaded them: rebuilt after a write, or refused

Knows torch and pieces, and no engine by name: those are in `integrations`.
"""
