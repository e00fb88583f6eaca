"""A policy without a model, to try workflows out and to test them: it says what a script says.

    player = Scripted("player", ["calculator: 3 + 4", "7"])
    episode = asyncio.run(play(Game(), 5, {"player": player}, random=Random(0)))

`player.contexts` then holds what the policy was shown, as text.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from pulse_rl.flow.samples import Turn

END = 0  # the token that ends the text
_SHIFT = 1  # of code points, so that END is no character


class Characters:
    """A tokenizer of characters: a token is a code point + 1, and 0 ends the text."""

    eos_token_id = END
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The tokens of a text."""
        return [ord(character) + _SHIFT for character in text]

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens."""
        return "".join(
            chr(int(token) - _SHIFT) if token != END else "" if skip_special_tokens else "<end>" for token in tokens
        )


class Scripted:
    """A policy that says what a script says, one text a turn.

    A text ends where a stop text of the request ends, or gets the end of the text; a completion has at most the tokens
    that are asked for. Every token has log-probability 0, and the version.

    Args:
        name: Of the policy.
        script: The texts in their order, or a function of the context's text.
        tokenizer: Of Transformers; None for one of characters.
        version: Of every token.
    """

    def __init__(
        self,
        name: str,
        script: Iterable[str] | Callable[[str], str],
        *,
        tokenizer: Any = None,
        version: int = 0,
    ) -> None:
        self.name = name
        self.tokenizer = Characters() if tokenizer is None else tokenizer
        self.version = version
        self.contexts: list[str] = []
        self._say = script if callable(script) else None
        self._texts = iter(()) if callable(script) else iter(script)

    async def complete(
        self,
        context: Sequence[int],
        *,
        max_new_tokens: int,
        stop: Sequence[str] | None = None,
    ) -> Turn:
        """The script's next text, as a turn.

        Args:
            context: Token ids.
            max_new_tokens: The longest completion.
            stop: As for a policy.

        Returns:
            The turn.

        Raises:
            LookupError: If the script has ended.
        """
        seen = self.tokenizer.decode(list(context), skip_special_tokens=False)
        self.contexts.append(seen)
        text = self._say(seen) if self._say else next(self._texts, None)
        if text is None:
            raise LookupError(f"{self.name}: the script has {len(self.contexts) - 1} texts, and one more was asked for")
        tokens = self._stopped(self.tokenizer.encode(text, add_special_tokens=False), ("\n",) if stop is None else stop)
        tokens = tokens[:max_new_tokens]
        return Turn(
            policy=self.name,
            prompt=np.array(context, np.int64),
            tokens=np.array(tokens, np.int64),
            logprobs=np.zeros(len(tokens), np.float32),
            versions=np.full(len(tokens), self.version, np.int64),
        )

    def _stopped(self, tokens: Sequence[int], stop: Sequence[str]) -> list[int]:
        for number, token in enumerate(tokens):
            text = self.tokenizer.decode([token], skip_special_tokens=False)
            if any(part in text for part in stop):
                return list(tokens[: number + 1])
        return [*tokens, self.tokenizer.eos_token_id]


class Echo(Scripted):
    """A policy that repeats the last line of its context.

    Args:
        name: Of the policy.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, lambda context: context.rstrip("\n").rsplit("\n", 1)[-1])
