"""Chats and the endpoint: contexts go on from the tokens kept, and programs speak OpenAI's protocol over HTTP."""

import asyncio
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers

from pulse_rl.flow import Policy, Scripted, Turn, play
from pulse_rl.flow.playing.chat import Chat
from pulse_rl.flow.playing.endpoint import Endpoint
from pulse_rl.flow.playing.workflow import build
from pulse_rl.flow.registry import Plugin

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}<|im_start|>{{ m.role }}\n"
    "{{ m.content | trim }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ["the", " cat", " sat", "cat", "sat", "user", "assistant"]


def _tokenizer(template: str | None = TEMPLATE) -> Any:
    """A BPE of letters and a few words, with ChatML's marks as special tokens."""
    letters = sorted(
        {letter for word in WORDS for letter in word} | set('\n .?!x:{}"_<>/,0123456789bdfghijklmnopqvwyzN')
    )
    merges, vocabulary = [], list(letters)
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                merges.append((word[: end - 1], word[end - 1]))
                vocabulary.append(word[:end])
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={piece: i for i, piece in enumerate(vocabulary)}, merges=merges)
    )
    core.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = template
    return tokenizer


class Letters(Scripted):
    """A policy that writes its script letter by letter, though its tokenizer merges. limit: tokens that it writes."""

    async def complete(self, context: Sequence[int], **settings: Any) -> Turn:
        turn = await super().complete(context, **settings)
        text = self.tokenizer.decode(turn.tokens.tolist(), skip_special_tokens=True)
        tokens = [self.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in text]
        if turn.tokens[-1] == self.tokenizer.eos_token_id:
            tokens.append(self.tokenizer.eos_token_id)
        return turn._replace(
            tokens=np.array(tokens, np.int64),
            logprobs=-np.arange(len(tokens)).astype(np.float32),
            versions=np.full(len(tokens), 4, np.int64),
        )


def _chat(script: list[str], template: str | None = TEMPLATE, limit: int = 64) -> tuple[Chat, list[Turn], Letters]:
    client = Letters("solver", script, tokenizer=_tokenizer(template))
    turns: list[Turn] = []
    return Chat(Policy(client, turns, max_new_tokens=limit)), turns, client


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _talk(chat: Chat, *questions: str) -> list[dict[str, Any]]:
    """Messages of a chat, each question with its reply, as a program keeps them."""

    async def talk() -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        for question in questions:
            messages.append(_user(question))
            messages.append((await chat.reply(messages)).message)
        return messages

    return asyncio.run(talk())


def test_a_chat_goes_on_from_the_tokens_that_were_sampled() -> None:
    chat, turns, client = _chat([" the cat", "sat"])
    messages = _talk(chat, "the?", "cat?")
    assert [message["content"] for message in messages] == ["the?", " the cat", "cat?", "sat"]
    first, second = turns
    kept = [*first.prompt.tolist(), *first.tokens.tolist()]
    assert second.prompt.tolist()[: len(kept)] == kept, "letter by letter, as they were sampled"
    whole = "<|im_start|>user\nthe?<|im_end|>\n<|im_start|>assistant\n the cat<|im_end|>\n"
    assert client.contexts[1] == whole + "<|im_start|>user\ncat?<|im_end|>\n<|im_start|>assistant\n"
    again = client.tokenizer.encode(client.contexts[1], add_special_tokens=False)
    assert again != second.prompt.tolist(), "a new tokenisation would merge what the policy wrote"


def test_a_reply_that_was_cut_off_is_closed() -> None:
    chat, _, client = _chat(["the cat", "sat"], limit=3)
    _talk(chat, "the?", "cat?")
    assert "<|im_start|>assistant\nthe cat<|im_end|>\n<|im_start|>user\ncat?" in client.contexts[1]


def test_an_empty_reply_is_closed() -> None:
    chat, _, client = _chat(["", "sat"])
    _talk(chat, "the?", "cat?")
    assert client.contexts[1].count("<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\ncat?") == 1


def test_a_template_that_forgets_is_a_context_of_its_own() -> None:
    chat, turns, client = _chat(["the", "sat"], FORGETFUL)
    _talk(chat, "the?", "cat?")
    assert client.contexts[1] == (
        "<|im_start|>user\nthe?<|im_end|>\n<|im_start|>user\ncat?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert turns[1].prompt.tolist() == client.tokenizer.encode(client.contexts[1], add_special_tokens=False)


def test_changed_messages_are_a_context_of_their_own_and_branches_are_kept() -> None:
    chat, turns, _ = _chat(["the cat", "sat", "cat", "cat sat"])
    messages = _talk(chat, "the?")

    async def more() -> list[bool]:
        changed = [_user("The?"[1:]), {"role": "assistant", "content": "another"}, _user("cat?")]
        return [
            (await chat.reply([*messages, _user("cat?")])).resumed,
            (await chat.reply(changed)).resumed,
            (await chat.reply([*messages, _user("sat?")])).resumed,
        ]

    assert asyncio.run(more()) == [True, False, True]
    kept = [*turns[0].prompt.tolist(), *turns[0].tokens.tolist()]
    assert turns[1].prompt.tolist()[: len(kept)] == turns[3].prompt.tolist()[: len(kept)] == kept


def test_lines_without_a_template() -> None:
    player = Scripted("solver", ["four\n", "yes"])
    chat = Chat(Policy(player, [], max_new_tokens=20))
    _talk(chat, "2 + 2?", "Sure?")
    assert player.contexts == ["user: 2 + 2?\nassistant:", "user: 2 + 2?\nassistant:four\nuser: Sure?\nassistant:"]


def test_calls_of_tools() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
    player = Scripted("solver", ["so " + call, call.replace("}}", "}"), "2"])
    chat = Chat(Policy(player, [], max_new_tokens=200))

    async def ask() -> None:
        messages: list[Any] = [_user("1 + x?")]
        reply = await chat.reply(messages, tools=tools)
        assert reply.finish_reason == "tool_calls"
        assert reply.message["content"] == "so"
        assert reply.message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"x": 1}'}
        broken = await chat.reply(messages, tools=tools)
        assert "tool_calls" not in broken.message
        assert broken.message["content"].startswith("<tool_call>")
        result = {"role": "tool", "tool_call_id": "call_0", "content": "2"}
        # Programs send a message back with fields that say nothing.
        back = reply.message | {"refusal": None, "audio": None}
        assert (await chat.reply([*messages, back, result], tools=tools)).resumed

    asyncio.run(ask())
    assert player.contexts[2] == f"user: 1 + x?\nassistant:so {call}<end>\ntool: 2\nassistant:"


@pytest.mark.parametrize(
    "messages",
    [[], [3], [{"content": "x"}], [{"role": "user", "content": 3}], [{"role": "user", "content": [{"type": "image"}]}]],
)
def test_messages_that_are_none_are_refused(messages: list[Any]) -> None:
    chat, turns, _ = _chat(["the"])
    with pytest.raises(ValueError, match="messages: expected"):
        asyncio.run(chat.reply(messages))
    assert not turns


# Over HTTP.


def _post(url: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", data), timeout=30) as answer:
            text = answer.read().decode()
            return answer.status, text if answer.headers["Content-Type"] == "text/event-stream" else json.loads(text)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_the_endpoint_answers_as_openai_does() -> None:
    pytest.importorskip("aiohttp", reason="needs aiohttp, of the extra verifiers")
    turns: list[Turn] = []
    solver = Policy(
        Letters("solver", ["the cat", "the cat sat", "sat"], tokenizer=_tokenizer()), turns, max_new_tokens=9
    )
    ask = {"model": "solver", "messages": [_user("the?")]}

    async def serve() -> None:
        endpoint = Endpoint()
        async with endpoint.session({"solver": solver}) as url:
            status, answer = await asyncio.to_thread(_post, url, ask | {"logprobs": True})
            assert status == 200
            choice = answer["choices"][0]
            assert choice["message"] == {"role": "assistant", "content": "the cat"}
            assert choice["finish_reason"] == "stop"
            assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == turns[0].logprobs.tolist()
            assert answer["usage"]["completion_tokens"] == len(turns[0].tokens)
            status, answer = await asyncio.to_thread(_post, url, ask | {"stop": [" sat"]})
            assert answer["choices"][0]["message"]["content"] == "the cat"
            status, answer = await asyncio.to_thread(_post, url, ask | {"stream": True, "max_tokens": 1})
            events = [line.removeprefix("data: ") for line in answer.split("\n\n") if line]
            assert events[-1] == "[DONE]"
            delta = json.loads(events[0])["choices"][0]
            assert (delta["delta"]["content"], delta["finish_reason"]) == ("sat", "length")
            for body, words in (
                (b"{", "Expecting"),
                ([], "expected an object"),
                ({"model": "solver"}, "messages"),
                (ask | {"model": "judge"}, "expected one of solver, found 'judge'"),
                (ask | {"n": 2}, "n: expected 1"),
                (ask | {"max_tokens": 0.5}, "max_tokens"),
                (ask | {"stop": [3]}, "stop"),
                (ask | {"tools": "x"}, "tools"),
                (ask | {"messages": [3]}, "messages: expected objects"),
            ):
                status, answer = await asyncio.to_thread(_post, url, body)
                assert status == 400
                assert words in answer["error"]["message"]
            elsewhere = url.replace(url.split("/")[3], "guessed")
            assert (await asyncio.to_thread(_post, elsewhere, ask))[0] == 404
            async with endpoint.session({}) as other:
                assert (await asyncio.to_thread(_post, other, ask))[0] == 400
        with pytest.raises(urllib.error.URLError):
            await asyncio.to_thread(_post, url, ask)

    asyncio.run(serve())
    assert len(turns) == 3
    assert all((turn.versions == 4).all() for turn in turns)


TASKSET = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.assistant_messages[-1].content.strip() == self.data.answer)

class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for a in range(3):
            yield SumTask(SumData(name=f"s{a}", prompt=f"{a} + {a}?", answer=str(2 * a)), self.config.task)

class PairConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()

class PairEnv(vf.Env[PairConfig]):
    async def run(self, task, agents):
        await agents.judge.run(task)
        async with agents.solver.interaction(task) as talk:
            first = await talk.turn()
            await talk.turn(f"You said {first.last_reply}. Again?")

__all__ = ["SumTaskset"EXPORTS]
"""


@pytest.fixture
def tasksets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers", reason="needs the extra verifiers")
    (tmp_path / "plain_sums.py").write_text(TASKSET.replace("EXPORTS", ""))
    (tmp_path / "pair_sums.py").write_text(TASKSET.replace("EXPORTS", ', "PairEnv"'))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("plain_sums", "pair_sums"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("tasksets")
def test_a_taskset_of_verifiers() -> None:
    workflow = build(Plugin("verifiers", {"taskset": "plain-sums"}), seed=0, policies=["solver"])
    assert workflow.roles == ("solver",)
    player = Scripted("solver", lambda context: "2" if "1 + 1" in context else "5")

    async def several() -> list[Any]:
        return await asyncio.gather(
            *(play(workflow, workflow.problem(number), {"solver": player}, random=Random(0)) for number in range(4))
        )

    episodes = asyncio.run(several())
    assert [episode.rewards["solver"] for episode in episodes] == [0, 1, 0, 0]
    assert [len(episode.turns) for episode in episodes] == [1] * 4


@pytest.mark.usefixtures("tasksets")
def test_two_agents_of_verifiers_are_two_policies() -> None:
    workflow = build(Plugin("verifiers", {"taskset": "pair-sums"}), seed=0, policies=["solver", "judge"])
    assert workflow.roles == ("solver", "judge")
    solver, judge = Scripted("solver", ["2", "0"]), Scripted("judge", ["0"])
    episode = asyncio.run(play(workflow, workflow.problem(0), {"solver": solver, "judge": judge}, random=Random(0)))
    assert episode.rewards == {"solver": 1.0, "judge": 1.0}
    assert [turn.policy for turn in episode.turns] == ["judge", "solver", "solver"]
    first, second = episode.turns[1:]
    kept = [*first.prompt.tolist(), *first.tokens.tolist()]
    assert second.prompt.tolist()[: len(kept)] == kept


@pytest.mark.usefixtures("tasksets")
def test_a_taskset_that_is_none() -> None:
    with pytest.raises(ValueError, match="workflow: taskset 'nowhere'"):
        build(Plugin("verifiers", {"taskset": "nowhere"}), seed=0, policies=["solver"])
