"""A harness for PrimeIntellect's `verifiers`: one agent as a chat in the process that trains.

`verifiers` finds a harness by the name of a package that exports one, hence this package beside `pulse_rl`. Its other
harnesses start a program for each episode. This one asks the environment's server from here, which costs no process. It
offers no tools and calls none of the taskset's: for these use a harness of `verifiers`.
"""

from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["ChatHarness"]


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]  # it has no types here
    """Sends the task's messages, and ends with the reply. An environment that plays the user goes on from there."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """One reply.

        Returns:
            The result of a program that succeeded, or what the server refused.
        """
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with (
            aiohttp.ClientSession() as client,
            client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
                timeout=aiohttp.ClientTimeout(total=None),  # the environment's own limits hold
            ) as response,
        ):
            text = await response.text()
        failed = response.status != 200
        return vf.ProgramResult(exit_code=int(failed), stdout="", stderr=text if failed else "")
