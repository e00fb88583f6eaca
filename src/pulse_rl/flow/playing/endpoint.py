"""An endpoint of OpenAI's chat completions over the policies of an episode, for environments that want one.

    endpoint = Endpoint()
    async with endpoint.session(policies) as url:
        ...  # POST url + "/chat/completions" {"model": "solver", "messages": [...]}

The model's name is the policy's. Each session has an address that nobody can guess, and listens on this machine alone.
The server runs while there are sessions. Tokens, log-probabilities and versions stay on this side: the policies record
each turn (`chat`). The temperature is the recipe's, whatever a request says, since the trainer computes with it.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from pulse_rl.errors import one_line, require
from pulse_rl.flow.playing.chat import Chat, Reply
from pulse_rl.flow.playing.workflow import Policy

BODY = 8 << 20  # bytes of a request, at most


class Endpoint:
    """The server of a worker; sessions share it. Raises MissingExtraError without aiohttp."""

    def __init__(self) -> None:
        self._web = require("aiohttp.web", "verifiers")
        self._sessions: dict[str, dict[str, Chat]] = {}
        self._lock = asyncio.Lock()
        self._runner: Any = None
        self._address = ""

    @asynccontextmanager
    async def session(self, policies: Mapping[str, Policy]) -> AsyncIterator[str]:
        """Offer policies to a program. Gives the base URL, which ends in /v1."""
        key = secrets.token_urlsafe(16)
        async with self._lock:
            if self._runner is None:
                await self._start()
            self._sessions[key] = {name: Chat(policy) for name, policy in policies.items()}
        try:
            yield f"{self._address}/{key}/v1"
        finally:
            async with self._lock:
                del self._sessions[key]
                if not self._sessions:
                    runner, self._runner = self._runner, None
                    await runner.cleanup()

    async def _start(self) -> None:
        app = self._web.Application(client_max_size=BODY)
        app.router.add_get("/{key}/v1/models", self._models)
        app.router.add_post("/{key}/v1/chat/completions", self._complete)
        self._runner = self._web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = self._web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._address = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _models(self, request: Any) -> Any:
        chats = self._sessions.get(request.match_info["key"])
        if chats is None:
            return self._error(404, "no such session")
        return self._web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in chats]})

    async def _complete(self, request: Any) -> Any:
        chats = self._sessions.get(request.match_info["key"])
        if chats is None:
            return self._error(404, "no such session")
        try:
            body = json.loads(await request.read())
            chat, arguments = _request(body, chats)
        except (ValueError, RecursionError) as error:
            return self._error(400, one_line(error, 300))
        try:
            reply = await chat.reply(**arguments)
        except ValueError as error:
            return self._error(400, one_line(error, 300))
        answer = _answer(chat.policy, reply, logprobs=bool(body.get("logprobs")))
        return await self._stream(request, answer) if body.get("stream") else self._web.json_response(answer)

    async def _stream(self, request: Any, answer: dict[str, Any]) -> Any:
        """The whole answer as one chunk: it is sampled as a whole."""
        choice = answer["choices"][0]
        message = dict(choice["message"])
        if "tool_calls" in message:
            message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
        chunk = answer | {"object": "chat.completion.chunk"}
        chunk["choices"] = [{"index": 0, "delta": message, "finish_reason": choice["finish_reason"]}]
        response = self._web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())
        await response.write_eof()
        return response

    def _error(self, status: int, message: str) -> Any:
        return self._web.json_response({"error": {"message": message, "code": status}}, status=status)


def _request(body: Any, chats: Mapping[str, Chat]) -> tuple[Chat, dict[str, Any]]:
    """The chat that a request is for, and what it is asked. Raises ValueError."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise ValueError("expected an object with a list of messages")
    model = body.get("model")
    if not isinstance(model, str) or model not in chats:
        raise ValueError(f"model: expected one of {', '.join(chats)}, found {model!r}")
    if body.get("n", 1) not in (1, None):
        raise ValueError(f"n: expected 1, found {body['n']!r}")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ValueError(f"max_tokens: expected at least 1, found {limit!r}")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"stop: expected texts, found {stop!r}")
    tools = body.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise ValueError("tools: expected a list")
    return chats[model], {"messages": body["messages"], "tools": tools, "max_new_tokens": limit, "stop": stop}


def _answer(policy: Policy, reply: Reply, *, logprobs: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "message": reply.message, "finish_reason": reply.finish_reason}
    if logprobs:
        tokens = zip(reply.turn.tokens.tolist(), reply.turn.logprobs.tolist(), strict=True)
        choice["logprobs"] = {
            "content": [
                {"token": policy.decode([token]), "logprob": logprob, "bytes": None, "top_logprobs": []}
                for token, logprob in tokens
            ]
        }
    prompt, made = len(reply.turn.prompt), len(reply.turn.tokens)
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": policy.name,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made},
    }
