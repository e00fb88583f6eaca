"""The reference run: GRPO post-training whose rollout workers follow the trainer through a store.

Autonomous actors around a data buffer, none inside another's loop:

    rollout workers ── pull work, push trajectories ──▶ buffer ◀── pull batches ── trainer
           ▲                                                                          │
           └───────────────── patches, through the store (PULSESync) ◀────────────────┘

`config` names the settings, `tasks` the rewards, `model` the weights, `policy` how text is sampled and scored,
`grpo` the loss, `buffer`, `rollout` and `trainer` the three actors, `run` the engine (Ray) around them, and
`display` what a person sees.
"""
