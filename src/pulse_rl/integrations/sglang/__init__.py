"""SGLang engines that follow a history, through SGLang's slot for custom weight loaders.

    python -m sglang.launch_server --model-path MODEL --custom-weight-loader pulse_rl.integrations.sglang.load

    engine = SGLangEngine("http://host:30000")       # in the trainer, or anywhere else
    engine.follow("s3://bucket/run-a")
    report = engine.update()                         # stage while it generates, then a short pause

    orders    what a client asks of the loader, and what its ranks answer
    loader    the function for the slot, which runs in each tensor-parallel rank
    client    drives one engine over HTTP

Nothing of SGLang is patched. Routes and arguments are those of SGLang 0.5.23.
"""

from pulse_rl.integrations.sglang.client import SGLangEngine
from pulse_rl.integrations.sglang.loader import load

__all__ = ["SGLangEngine", "load"]
