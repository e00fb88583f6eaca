"""Tasks with verifiable rewards, from reasoning-gym.

A prompt is a few solved examples and an unsolved one, each on one line, so that a small base model sees what is asked.
The completion ends with the line. The reward is the dataset's score of the answer, and at least a tenth for an answer
in the right form, so that a group that never solves the task still has variance.
"""

import dataclasses
import difflib
import re
from typing import Any, NamedTuple

from pulse_rl.errors import require

FORM_REWARD = 0.1
SHOTS = 2
SIZE = 1_000_000  # distinct prompts; reasoning-gym makes each on demand

RUN_SETTINGS = ("size", "seed")  # of every dataset; the run gives them
LISTING = "import reasoning_gym.factory as f; print(*sorted(f.DATASETS))"

# Settings with which the default model solves a task sometimes. Other tasks have reasoning-gym's defaults.
DEFAULTS: dict[str, dict[str, int]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Problem(NamedTuple):
    """A prompt, and the dataset's entry that scores an answer to it."""

    prompt: str
    entry: dict[str, Any]


class ProblemStream:
    """A stream of problems, reproducible from a seed.

    name: a reasoning-gym dataset, optionally with settings ("chain_sum:max_terms=3,max_digits=2"). seed: an int.
    Raises ValueError for an unknown dataset or setting, MissingExtraError without reasoning-gym.
    """

    def __init__(self, name: str, seed: int) -> None:
        gym = require("reasoning_gym", "run")
        dataset, _, text = name.partition(":")
        settings: dict[str, int | float | str] = dict(DEFAULTS.get(dataset, {}))
        for part in filter(None, text.split(",")):
            key, equals, value = part.partition("=")
            if not equals:
                raise ValueError(f"task setting: expected key=value, found {part!r}")
            settings[key] = _value(value)
        known = gym.factory.DATASETS
        if dataset not in known:
            near = difflib.get_close_matches(dataset, known, n=5, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}? All" if near else "all"
            raise ValueError(
                f"task: expected one of reasoning-gym's {len(known)} datasets, found {dataset!r}; {hint} are listed by "
                f"python -c '{LISTING}'"
            )
        settable = [field.name for field in dataclasses.fields(known[dataset][1]) if field.name not in RUN_SETTINGS]
        if unknown := [key for key in settings if key not in settable]:
            raise ValueError(f"task: {dataset} has no setting {unknown[0]!r}; it has {', '.join(settable)}")
        try:
            self._dataset = gym.create_dataset(dataset, size=SIZE, seed=seed, **settings)
        except (TypeError, AssertionError) as error:
            raise ValueError(f"task {name!r}: {error}") from None
        self.name = name
        # The examples are the last of the stream, which no run reaches.
        self._shots = "".join(self._line(self._dataset[SIZE - 1 - i], True) for i in range(SHOTS))

    def _line(self, entry: dict[str, Any], solved: bool) -> str:
        question = str(entry["question"]).strip()
        if "expression" in entry.get("metadata", {}):
            return f"{entry['metadata']['expression']} =" + (f" {entry['answer']}\n" if solved else "")
        return f"Question: {question}\nAnswer:" + (f" {entry['answer']}\n\n" if solved else "")

    def problem(self, index: int) -> Problem:
        """The problem of that number, always the same one. Numbers beyond the stream start over."""
        entry = self._dataset[index % (SIZE - SHOTS)]
        return Problem(self._shots + self._line(entry, False), entry)

    def reward(self, problem: Problem, completion: str) -> float:
        """The score of a completion, from 0 to 1."""
        line = completion.split("\n", 1)[0].strip()
        if _NUMBER.fullmatch(str(problem.entry["answer"])):
            found = _NUMBER.search(line)
            if not found:
                return 0.0
            line = found[0]
        elif not line:
            return 0.0
        return max(FORM_REWARD, float(self._dataset.score_answer(line, problem.entry)))


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
