"""Chats: messages in, a reply out, for programs that speak OpenAI's protocol instead of `Conversation`.

Such a program sends all messages of a conversation each time. The context must nevertheless be the tokens that the
policy saw and made before, not a new tokenisation of their text. So a `Chat` keeps each context with its reply: a
request whose messages begin with those of an earlier one goes on from the tokens kept, and only what is new is
tokenised. Where a request changes earlier messages, all of it is tokenised: the policy sees that, and is trained on it.

The text of new messages is what the tokenizer's chat template adds; without a template, lines "role: content".
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pulse_rl.flow.playing.workflow import Policy
from pulse_rl.flow.samples import Turn

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_PROMPT = "assistant:"


@dataclass(frozen=True)
class Reply:
    """A reply, as a message and as a turn."""

    message: dict[str, Any]  # of OpenAI's protocol
    turn: Turn
    finish_reason: str  # "stop", "length" or "tool_calls"
    resumed: bool  # whether it went on from tokens kept


@dataclass(frozen=True)
class _Kept:
    """A context and its reply."""

    messages: list[str]  # each as JSON; the reply is the last
    shown: list[dict[str, Any]]  # the same, as the template is shown them
    context: list[int]  # all tokens, the reply's included
    raw: str  # the reply's text with special tokens


@dataclass
class Chat:
    """One policy's chats of one episode."""

    policy: Policy
    _kept: list[_Kept] = field(default_factory=list)

    async def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """The policy's reply. Raises ValueError for messages that are none."""
        plain = [_plain(message) for message in messages]
        if not plain:
            raise ValueError("messages: expected at least one, found none")
        keys = [json.dumps(message, sort_keys=True) for message in plain]
        shown, context, resumed = self._context(plain, keys, tools)
        if self._template is None:
            stop = (*stop, "\n")
        turn = await self.policy.complete(context, max_new_tokens=max_new_tokens, stop=stop)
        text = self.policy.decode(turn.tokens)
        ended = self._ended(turn, stop)
        content, calls = _parse(_before(text, stop), tools)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = calls
        self._kept.append(
            _Kept(
                messages=[*keys, json.dumps(_plain(message), sort_keys=True)],
                shown=[*shown, {"role": "assistant", "content": text}],
                context=[*context, *turn.tokens.tolist()],
                raw=str(self.policy.tokenizer.decode(turn.tokens.tolist(), skip_special_tokens=False)),
            )
        )
        reason = "tool_calls" if calls else "stop" if ended else "length"
        return Reply(message, turn, reason, resumed)

    @property
    def _template(self) -> Any:
        return getattr(self.policy.tokenizer, "chat_template", None)

    def _context(
        self, plain: list[dict[str, Any]], keys: list[str], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[list[dict[str, Any]], list[int], bool]:
        """The messages as the template is shown them, the tokens, and whether they go on from a context kept."""
        for kept in sorted(self._kept, key=lambda kept: -len(kept.messages)):
            count = len(kept.messages)
            if count < len(keys) and keys[:count] == kept.messages:
                shown = [*kept.shown, *plain[count:]]
                added = self._added(kept, shown, tools)
                if added is not None:
                    return shown, [*kept.context, *self.policy.encode(added)], True
        return plain, self.policy.encode(self._render(plain, tools, prompt=True)), False

    def _added(self, kept: _Kept, shown: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        """The text after a reply: what closes it where it was cut off, and the new messages.

        None where the template does not repeat what it wrote before, as one that leaves out earlier thoughts.
        """
        before = self._render(kept.shown, tools, prompt=False)
        whole = self._render(shown, tools, prompt=True)
        said = str(kept.shown[-1]["content"]).strip()
        asked = self._render(kept.shown[:-1], tools, prompt=True)
        place = before.find(said, len(asked)) if before.startswith(asked) else -1
        if not whole.startswith(before) or place < 0:
            return None
        closing = before[place + len(said) :]
        for end in (self._end, "\n"):
            if kept.raw.endswith(end):
                closing = closing.removeprefix(end)
        return closing + whole[len(before) :]

    @property
    def _end(self) -> str:
        """The text of the token that ends a reply."""
        tokenizer = self.policy.tokenizer
        return str(tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=False))

    def _render(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, prompt: bool
    ) -> str:
        if self._template is None:
            lines = "".join(f"{message['role']}: {str(message['content']).strip()}\n" for message in messages)
            return lines + _PROMPT * prompt
        rendered = self.policy.tokenizer.apply_chat_template(
            messages, tools=list(tools) if tools else None, add_generation_prompt=prompt, tokenize=False
        )
        return str(rendered)

    def _ended(self, turn: Turn, stop: Sequence[str]) -> bool:
        if not len(turn.tokens):
            return False
        last = int(turn.tokens[-1])
        text = self.policy.tokenizer.decode([last], skip_special_tokens=False)
        return last == self.policy.tokenizer.eos_token_id or any(part in text for part in stop)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with what matters, in one form. Raises ValueError for what is none."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        raise ValueError(f"messages: expected objects with a role, found {message!r:.100}")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            raise ValueError("messages: expected text alone, found content of another type")
        content = "".join(str(part.get("text", "")) for part in content)
    if content is not None and not isinstance(content, str):
        raise ValueError(f"messages: expected content as text, found {type(content).__name__}")
    plain: dict[str, Any] = {"role": role, "content": content or ""}
    if message.get("tool_calls"):
        plain["tool_calls"] = [
            {"id": call.get("id"), "type": "function", "function": dict(call["function"])}
            for call in message["tool_calls"]
        ]
    for name in ("name", "tool_call_id"):
        if message.get(name):
            plain[name] = message[name]
    return plain


def _before(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop text, as the protocol has it."""
    return text[: min((place for part in stop if (place := text.find(part)) >= 0), default=len(text))]


def _parse(text: str, tools: Sequence[Mapping[str, Any]] | None) -> tuple[str, list[dict[str, Any]]]:
    """The content of a reply, and its calls of tools: <tool_call>{"name": …, "arguments": {…}}</tool_call>.

    A call that is no JSON stays text, so the program sees what the policy wrote.
    """
    if not tools:
        return text, []
    calls = []
    for number, match in enumerate(_CALL.finditer(text)):
        try:
            call = json.loads(match[1])
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments", {}))}
        except (ValueError, KeyError, TypeError, RecursionError):
            return text, []
        calls.append({"id": f"call_{number}", "type": "function", "function": function})
    return (_CALL.sub("", text).strip() if calls else text), calls
