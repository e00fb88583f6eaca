"""The reference run: GRPO post-training whose rollout workers follow the trainer through a store.

Separate processes around a data buffer; none runs inside another's loop:

    rollout workers ── take assignments, push completions ──▶ buffer ◀── pull batches ── trainer
           ▲                                                                                │
           └──────────────────── patches, through the store (PULSESync) ◀───────────────────┘

- the processes: `rollout`, `buffer`, `trainer`; of rank 0 also `lead`, which publishes
- the algorithm: `grpo` (the loss), `policy` (sampling and scoring text), `tasks` (rewards), `model` (the weights; their
  names are in `model_name`)
- several trainers: `trainer_group`
- the driver: `run`, with `trainer_pool` and `worker_pool`; `engine` (Ray) starts processes
- on disk and on screen: `config`, `directory`, `checkpoints`, `metrics`, `report`; `display`
"""
