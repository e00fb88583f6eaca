"""The reference run: GRPO post-training whose rollout workers follow the trainer through a store.

Autonomous actors around a data buffer, none inside another's loop:

    rollout workers ── pull work, push trajectories ──▶ buffer ◀── pull batches ── trainer
           ▲                                                                          │
           └───────────────── patches, through the store (PULSESync) ◀────────────────┘

`config` names the settings, `tasks` the rewards, `model` the weights, `policy` how text is sampled and scored,
`grpo` the loss; `buffer`, `rollout` and `trainer` are the three actors, `engine` (Ray) gives them processes. There may
be several trainers: `peers` is how they stay together, `lead` what the first does for all. `run` is the driver that
watches, `team` its hold on the trainers and `crew` on the rollout workers, `directory` and `metrics` what is on disk,
and `display` what a person sees.
"""
