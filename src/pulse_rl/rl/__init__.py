"""The pieces of a run of RL post-training, each usable without the others: `flow` makes a run of them.

- the algorithm: `grpo` (advantages and the clipped loss), `policy` (sampling and scoring text), `tasks` (problems and
  rewards)
- the weights: `model` (their names are in `model_name`); `sampler` and `vllm_sampler` sample from those that follow a
  history
- the processes: `engine`, by Ray
- on disk: `directory`, `checkpoints`, `metrics`
"""
