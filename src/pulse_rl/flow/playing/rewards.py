"""Rewards of an answer, by name: a function of the task, the problem and the completion's text.

    def brief(task, problem, completion):
        return task.reward(problem, completion) / (1 + len(completion))

A recipe takes it as `reward = "my_module:brief"` in `[workflow]`.
"""

from pulse_rl.flow.tasks import Problem, ProblemStream


def score(task: ProblemStream, problem: Problem, completion: str) -> float:
    """The dataset's score, and at least a tenth for an answer in the right form."""
    return task.reward(problem, completion)


def exact(task: ProblemStream, problem: Problem, completion: str) -> float:
    """1 for the line that is the answer and nothing else, otherwise 0."""
    return float(completion.split("\n", 1)[0].strip() == str(problem.entry["answer"]))
