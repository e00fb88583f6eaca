"""The names of the objects through which trainers meet, all below one folder.

    trainers/run.json                                who may take part, and the state that the run began with
    trainers/first.json                              the round from which on everything stays; only after a pruning
    trainers/rounds/000000000007/00002.json          the offer of rank 2 in round 7
    trainers/rounds/000000000007/commit.json         the round's commit: which offers count
    trainers/rounds/000000000007/stop-00002-<life>.json
                                                     why rank 2 cannot take part
    trainers/rounds/000000000007/lack-00002-<life>.json
                                                     which earlier round rank 2 cannot end
    trainers/payloads/000000000007/00002-<life>/00000
                                                     what it sends of fragment 0
    trainers/anchors/000000000050.json               a state that newcomers start from: θ and momentum after round 50
    trainers/anchors/000000000050-<life>/00000       its fragment 0

A life is a process: 16 random hex digits. So a trainer that is started again overwrites nothing of its former life's.
"""

from typing import Literal

from pulse_rl.log.objects import number_in

FOLDER = "trainers"
RUN, FIRST = f"{FOLDER}/run.json", f"{FOLDER}/first.json"
ROUNDS, PAYLOADS, ANCHORS = f"{FOLDER}/rounds", f"{FOLDER}/payloads", f"{FOLDER}/anchors"

_NOTICE = r"{}-(\d{{5}})-[0-9a-f]{{16}}\.json"

round_of = number_in(rf"{FOLDER}/(?:rounds|payloads|anchors)/(\d{{12}})[./-].+")  # of any object that is of a round
committed_round = number_in(rf"{ROUNDS}/(\d{{12}})/commit\.json")
anchored_round = number_in(rf"{ANCHORS}/(\d{{12}})\.json")
# In the folder of a round:
offering_rank = number_in(r"(\d{5})\.json")
stopped_rank = number_in(_NOTICE.format("stop"))
lacking_rank = number_in(_NOTICE.format("lack"))


def round_folder(round: int) -> str:
    """The folder of a round; names of this and later rounds sort after it."""
    return f"{ROUNDS}/{round:012d}"


def commit_name(round: int) -> str:
    return f"{round_folder(round)}/commit.json"


def offer_name(round: int, rank: int) -> str:
    return f"{round_folder(round)}/{rank:05d}.json"


def notice_name(kind: Literal["stop", "lack"], round: int, rank: int, life: str) -> str:
    return f"{round_folder(round)}/{kind}-{rank:05d}-{life}.json"


def payload_name(round: int, rank: int, life: str, fragment: int) -> str:
    return f"{PAYLOADS}/{round:012d}/{rank:05d}-{life}/{fragment:05d}"


def anchor_name(round: int) -> str:
    return f"{ANCHORS}/{round:012d}.json"


def anchor_part_name(round: int, life: str, fragment: int) -> str:
    return f"{ANCHORS}/{round:012d}-{life}/{fragment:05d}"
