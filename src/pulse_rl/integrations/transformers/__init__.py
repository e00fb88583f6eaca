"""Callbacks for Transformers' Trainer, and for trainers made from it, as TRL's are; and generation that follows.

    trainer.add_callback(PublishCallback("s3://bucket/run", log=trainer))
    trainer.add_callback(SparsityCallback(trainer, path="sparsity.jsonl"))

The first publishes the weights after every optimizer step, also those that FSDP or DeepSpeed has sharded; the second
measures how sparse these steps are, in the first of several processes and of whole weights alone.

    with FollowWhileGenerating(pulse.Subscriber("s3://bucket/run"), model) as follow:
        model.generate(**inputs, logits_processor=[follow])

stages new versions in a thread, and writes each between two tokens.
Importing this raises MissingExtraError where Transformers is not installed.

    publish     PublishCallback
    checkpoint  checkpoint_weights, for engines that know the names of checkpoints alone
    sparsity    SparsityCallback
    generate    FollowWhileGenerating
"""

from pulse_rl.integrations.transformers.checkpoint import checkpoint_weights
from pulse_rl.integrations.transformers.generate import FollowWhileGenerating
from pulse_rl.integrations.transformers.publish import PublishCallback
from pulse_rl.integrations.transformers.sparsity import SparsityCallback

__all__ = ["FollowWhileGenerating", "PublishCallback", "SparsityCallback", "checkpoint_weights"]
