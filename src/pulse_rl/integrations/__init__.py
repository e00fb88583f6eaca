"""One file for each framework, imported by its users only. They adapt; they decide nothing.

    steps         what callbacks share that publish after a trainer's steps
    transformers  callbacks for its Trainer, which publish the weights and measure their sparsity
    lightning     the same callback for its Trainer
    axolotl       a plug-in, which adds that callback
    fsdp          the shards of FSDP1's flat parameters
    deepspeed     the partitions of ZeRO stage 3
    megatron      a layout that is learned from the converter to Hugging Face's
    masters       changes collected where an optimizer casts its FP32 masters
    peft          adapters alone, and merged weights
    delivery      what the next three share: publish what is handed out, bring all engines to it
    trl           a weight transfer for its trainers
    vllm          engines that follow, and its trainer factory
    skyrl         its weight sync `delta`
    verl          a checkpoint engine for it

What they yield is name → tensor, `pulse.Shard`, or a list of them. FSDP2 and tensor parallelism need no file: DTensors
are understood as they are.
"""
