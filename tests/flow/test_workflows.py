"""Workflows: tokens are never tokenised again, every turn is recorded, and what each workflow does with its replies."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from pulse_rl import flow
from pulse_rl.flow import Conversation, Echo, Episode, Policy, Rewards, Scripted, Tools, Turn, play, recipe_file
from pulse_rl.flow.playing.workflow import build
from pulse_rl.flow.registry import Plugin
from pulse_rl.flow.tasks import ProblemStream
from tests import ROOT

GAME = ROOT / "examples" / "sum_game.toml"


def _play(workflow: Any, number: int, *players: Scripted, max_new_tokens: int = 64) -> Episode:
    clients = {player.name: player for player in players}
    problem = workflow.problem(number)
    return asyncio.run(play(workflow, problem, clients, random=Random(0), max_new_tokens=max_new_tokens))


def _build(name: str, *policies: str, **settings: Any) -> Any:
    return build(Plugin(name, settings), seed=3, policies=policies or ["solver"])


class Pairs:
    """A tokenizer that merges: "ab" is one token where the letters follow each other in one text."""

    eos_token_id = 0
    _pieces = ("", "a", "b", "ab", "\n", "c")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokens = []
        while text:
            piece = max((p for p in self._pieces[1:] if text.startswith(p)), key=len)
            tokens.append(self._pieces.index(piece))
            text = text[len(piece) :]
        return tokens

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(self._pieces[token] for token in tokens)


class Sampling:
    """A policy that samples given tokens, at given versions."""

    def __init__(self, name: str, *turns: tuple[list[int], list[int]]) -> None:
        self.name, self.tokenizer = name, Pairs()
        self._turns = list(turns)

    async def complete(
        self,
        context: Sequence[int],
        *,
        max_new_tokens: int,
        stop: Sequence[str] | None = None,
    ) -> Turn:
        tokens, versions = self._turns.pop(0)
        return Turn(
            self.name,
            np.array(context, np.int64),
            np.array(tokens, np.int64),
            (np.array(tokens) / -10).astype(np.float32),
            np.array(versions, np.int64),
        )


def test_a_reply_stays_the_tokens_that_were_sampled() -> None:
    """The policy writes "a" and "b" as two tokens. Its text, tokenised, would be one."""

    async def two_turns(problem: Any, policies: Mapping[str, Policy], tools: Tools, random: Random) -> Rewards:
        talk = Conversation(policies["solver"], "cab")
        assert await talk.reply() == "ab\n"
        talk.add("bab")
        assert await talk.reply() == "b"
        assert talk.context == [5, 3, 1, 2, 4, 2, 3, 2]
        return Rewards({"solver": 1.0})

    client = Sampling("solver", ([1, 2, 4], [6, 6, 7]), ([2], [7]))
    assert Pairs().encode("ab\n", add_special_tokens=False) == [3, 4] != [1, 2, 4]
    workflow = build(Plugin(f"{__name__}:_unused"), seed=0, policies=["solver"])
    workflow._play = two_turns  # type: ignore[attr-defined]
    episode = asyncio.run(play(workflow, 0, {"solver": client}, random=Random(0)))
    assert [turn.prompt.tolist() for turn in episode.turns] == [[5, 3], [5, 3, 1, 2, 4, 2, 3]]
    assert [turn.tokens.tolist() for turn in episode.turns] == [[1, 2, 4], [2]]
    assert [turn.versions.tolist() for turn in episode.turns] == [[6, 6, 7], [7]]
    np.testing.assert_array_equal(episode.turns[0].logprobs, np.array([-0.1, -0.2, -0.4], np.float32))


async def _unused(problem: Any, policies: Any, tools: Any, random: Any) -> Rewards:
    raise AssertionError


def _workflow(given: Callable[..., Any]) -> Any:
    class Workflow:
        roles = ("solver",)

        def problem(self, number: int) -> int:
            return number

        async def play(self, problem: Any, policies: Mapping[str, Policy], tools: Tools, random: Random) -> Any:
            await policies["solver"].complete([1], stop=())
            return given()

    return Workflow()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: {"solver": 1.0}, "expected Rewards from play, found dict"),
        (lambda: Rewards({}), "solver took a turn, and play returned no reward of it"),
        (lambda: Rewards({"solver": 1.0, "other": 1.0}), "found one of 'other'"),
        (lambda: Rewards({"solver": float("nan")}), "finite"),
        (lambda: Rewards({"solver": float("inf")}), "finite"),
    ],
)
def test_rewards_that_are_none_are_refused(given: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _play(_workflow(given), 0, Scripted("solver", ["x"]))


def test_a_turn_is_recorded_even_where_the_workflow_ignores_it() -> None:
    episode = _play(_workflow(lambda: Rewards({"solver": 0.5}, {"solved": True})), 0, Echo("solver"))
    assert len(episode.turns) == 1
    assert episode.facts == {"solved": 1.0}


def test_completions_have_at_most_the_recipes_tokens() -> None:
    async def ask(problem: Any, policies: Mapping[str, Policy], tools: Tools, random: Random) -> Rewards:
        await policies["solver"].complete([1], max_new_tokens=100)
        await policies["solver"].complete([1], max_new_tokens=2)
        return Rewards({"solver": 0.0})

    workflow = build(Plugin(f"{__name__}:_unused"), seed=0, policies=["solver"])
    workflow._play = ask  # type: ignore[attr-defined]
    episode = _play(workflow, 0, Scripted("solver", ["a" * 50] * 2), max_new_tokens=9)
    assert [len(turn.tokens) for turn in episode.turns] == [9, 2]


def test_math_is_the_task_of_the_run() -> None:
    workflow, task = _build("math"), ProblemStream("chain_sum", 3)
    for number in range(5):
        problem = task.problem(number)
        answer = str(problem.entry["answer"])
        for text in (f" {answer}\n", " x\n", f" {answer}0\n", f" {answer} or so", ""):
            player = Scripted("solver", [text])
            episode = _play(workflow, number, player)
            assert player.contexts == [problem.prompt]
            assert episode.rewards["solver"] == task.reward(problem, text)
            assert episode.facts["solved"] == (task.reward(problem, text) == 1)


def test_a_reward_of_another_name() -> None:
    workflow = _build("math", reward="exact")
    answer = workflow.problem(0).entry["answer"]
    assert _play(workflow, 0, Scripted("solver", [f" {answer}\n"])).rewards == {"solver": 1.0}
    assert _play(workflow, 0, Scripted("solver", [f" {answer}!\n"])).rewards == {"solver": 0.0}


@pytest.mark.parametrize(
    ("answers", "verdicts", "rewards"),
    [
        (["right"], ["yes"], (1.0, 1.0)),
        (["right"], ["no", "no"], (1.0, 0.1)),
        (["99"], ["yes"], (0.1, 0.1)),
        (["99", "right"], ["no", "yes"], (1.0, 1.0)),
        (["99", "98"], ["no", "no"], (0.1, 1.0)),
        (["right"], ["perhaps"], (1.0, 0.0)),
        (["x", "right"], ["no", "perhaps"], (1.0, 0.5)),
    ],
)
def test_solver_and_verifier(answers: list[str], verdicts: list[str], rewards: tuple[float, float]) -> None:
    workflow = _build("solver-verifier", "solver", "verifier", rounds=2)
    right = workflow.problem(0).entry["answer"]
    said = [str(right) if answer == "right" else answer for answer in answers]
    solver = Scripted("solver", [f" {answer}\n" for answer in [*said, said[-1]]])
    verifier = Scripted("verifier", [f" {verdict}\n" for verdict in verdicts])
    episode = _play(workflow, 0, solver, verifier)
    assert (episode.rewards["solver"], episode.rewards["verifier"]) == pytest.approx(rewards)
    assert [turn.policy for turn in episode.turns] == ["solver", "verifier"] * len(verdicts)
    assert all(f"{answer}. Is this right?" in seen for answer, seen in zip(said, verifier.contexts, strict=False))
    if len(verdicts) > 1:
        assert solver.contexts[1].startswith(f"{solver.contexts[0]} {said[0]}\n"), "it sees its earlier answer"


@pytest.mark.parametrize(
    ("lines", "reward", "facts"),
    [
        (["Tool: {sum}", "Answer: {right}"], 1.0, {"solved": 1.0, "tool_calls": 1.0, "tool_errors": 0.0}),
        (["Answer: {right}"], 1.0, {"solved": 1.0}),
        (["Tool: one", "Answer: 7"], 0.1, {"solved": 0.0, "tool_calls": 1.0, "tool_errors": 1.0}),
        (["Tool: 1"] * 3, 0.0, {"solved": 0.0, "tool_calls": 3.0, "tool_errors": 0.0}),
        (["Well, {right}"], 0.0, {"solved": 0.0}),
        (["Answer {right}"], 0.0, {"solved": 0.0}),
    ],
)
def test_tool_use(lines: list[str], reward: float, facts: dict[str, float]) -> None:
    workflow = _build("tool-use")
    entry = workflow.problem(0).entry
    expression = entry["metadata"]["expression"]
    player = Scripted("solver", [line.format(sum=expression, right=entry["answer"]) + "\n" for line in lines])
    episode = _play(workflow, 0, player)
    assert episode.rewards == {"solver": reward}
    assert episode.facts == facts
    if lines[0] == "Tool: {sum}":
        assert player.contexts[1].endswith(f"Tool: {expression}\nResult: {entry['answer']}\n")


def test_tool_use_with_python() -> None:
    workflow = _build("tool-use", tool="python")
    entry = workflow.problem(0).entry
    script = ["Tool: print(" + entry["metadata"]["expression"] + ")\n", f"Answer: {entry['answer']}\n"]
    assert _play(workflow, 0, Scripted("solver", script)).rewards == {"solver": 1.0}


def test_a_gym_of_several_datasets() -> None:
    workflow = _build("gym", datasets=["chain_sum", "leg_counting"])
    for number in range(4):
        task, problem = workflow.problem(number)
        assert task.name == ("chain_sum", "leg_counting")[number % 2]
        player = Scripted("solver", [f" {problem.entry['answer']}\n"])
        assert _play(workflow, number, player).rewards == {"solver": 1.0}
        assert player.contexts == [problem.prompt]
    chat = _build("gym", datasets=["leg_counting"], chat=True)
    player = Scripted("solver", [f"Let me see. Answer: {chat.problem(0)[1].entry['answer']}"])
    assert _play(chat, 0, player).rewards == {"solver": 1.0}


@pytest.mark.parametrize(
    ("lines", "reward"),
    [(["{right}"], 1.0), (["ask {sum}", "{right}"], 0.5), (["ask nothing", "0"], 0.1), (["none"], 0.0)],
)
def test_the_game_of_the_documentation(lines: list[str], reward: float) -> None:
    recipe = recipe_file.load(GAME, ["model=tiny"])
    game: Any = build(recipe.workflow.plugin, seed=0, policies=["player"])
    a, b = game.problem(4)
    player = Scripted("player", [" " + line.format(sum=f"{a} + {b}", right=a + b) + "\n" for line in lines])
    assert a + b > 0
    assert _play(game, 4, player).rewards == {"player": reward}


def test_the_recipe_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    recipe = recipe_file.load(GAME, ["model=tiny"])
    assert recipe.workflow.settings == {"digits": 1}
    assert recipe.path == str(GAME.parent)
    assert len(GAME.with_suffix(".py").read_text().splitlines()) < 60
    page = (GAME.parents[1] / "docs" / "workflows.md").read_text()
    assert all(GAME.with_suffix(suffix).read_text() in page for suffix in (".py", ".toml"))


def test_a_script_that_has_ended_says_so() -> None:
    with pytest.raises(LookupError, match="solver: the script has 0 texts"):
        _play(_build("math"), 0, Scripted("solver", []))


def test_public_names_are_there() -> None:
    assert sorted(flow.__all__) == sorted(flow._HOME)
    assert all(getattr(flow, name) is not None for name in flow.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        flow.nothing  # noqa: B018
