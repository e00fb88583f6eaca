"""Two policies: one answers, the other judges the answer; both learn.

The verifier sees the problem with the solver's answer and says yes or no, in one line. Where it says no and rounds are
left, the solver answers again; it sees its earlier answers. The solver's reward is the dataset's score of its last
answer. The verifier's is the mean over its verdicts: 1 for a right one, a tenth for a wrong one, 0 for what is neither
yes nor no, so that the form is learned first.
"""

from collections.abc import Mapping
from random import Random

from pulse_rl.flow.playing.tools import Tools
from pulse_rl.flow.playing.workflow import Conversation, Policy, Rewards
from pulse_rl.flow.tasks import FORM_REWARD, Problem, ProblemStream

# Both verdicts are shown, so that neither is the likelier one.
_SHOTS = "2 + 5 = 7. Is this right? yes\n8 - 3 = 4. Is this right? no\n"


class SolverVerifier:
    """The policy `solver` answers, the policy `verifier` judges.

    Args:
        seed: Of the problems; the run gives its own.
        task: The reasoning-gym dataset, with settings as in "chain_sum:max_terms=3".
        rounds: Answers that the solver has, at most.
    """

    roles = ("solver", "verifier")

    def __init__(self, seed: int, task: str = "chain_sum", rounds: int = 1) -> None:
        if rounds < 1:
            raise ValueError(f"rounds: expected at least 1, found {rounds}")
        self._task = ProblemStream(task, seed)
        self._rounds = rounds

    def problem(self, number: int) -> Problem:
        """The problem of that number."""
        return self._task.problem(number)

    async def play(self, problem: Problem, policies: Mapping[str, Policy], tools: Tools, random: Random) -> Rewards:
        """Answer and judge, until the verifier is content or the rounds are over.

        Returns:
            Both rewards.
        """
        solving = Conversation(policies["solver"], problem.prompt)
        question = problem.prompt.rstrip("\n").rsplit("\n", 1)[-1]
        scores: list[float] = []
        verdicts: list[float] = []
        for round_number in range(self._rounds):
            answer = await solving.reply_line()
            scores.append(self._task.reward(problem, answer))
            judging = Conversation(policies["verifier"], f"{_SHOTS}{question} {answer}. Is this right?")
            verdict = (await judging.reply()).strip().lower()
            says_yes, says_no = verdict.startswith("yes"), verdict.startswith("no")
            right = says_yes if scores[-1] == 1 else says_no
            verdicts.append(1.0 if right else FORM_REWARD if says_yes or says_no else 0.0)
            if not says_no or round_number + 1 == self._rounds:
                break
            solving.add(question)
        return Rewards(
            {"solver": scores[-1], "verifier": sum(verdicts) / len(verdicts)},
            {
                "solved": float(scores[-1] == 1),
                "rounds": float(len(scores)),
                "judged_right": sum(verdict == 1 for verdict in verdicts) / len(verdicts),
            },
        )
