# SPDX-License-Identifier: Apache-2.0
"""Which ranks use the same folders: all, or those of one node (``checkpoint.use_node_local_storage``)."""

import uuid
from dataclasses import dataclass

from deepspeed.checkpoint.storage import CheckpointError
from deepspeed.comm.control import ControlChannel


@dataclass(frozen=True)
class FolderSharing:
    """Seen from one rank.

    Args:
        rank: this rank.
        ranks: those that see the same folders, this one among them; the first one makes and renames folders.
        writes_weights: whether this rank writes the file of weights that several ranks could write.
        save: drawn anew each time, the same on all nodes; empty where all ranks share one folder.
    """

    rank: int
    ranks: tuple[int, ...]
    writes_weights: bool
    save: str = ""

    @property
    def leads(self) -> bool:
        return self.rank == self.ranks[0]

    @property
    def position(self) -> int:
        return self.ranks.index(self.rank)


def one_folder(channel: ControlChannel, writes_weights: bool) -> FolderSharing:
    """All ranks share one folder."""
    return FolderSharing(channel.rank, tuple(range(channel.world_size)), writes_weights)


def folder_per_node(channel: ControlChannel, local_rank: int, mp_rank: int) -> FolderSharing:
    """Ranks of a node follow each other, and their local ranks count from 0. Collective.

    Raises:
        CheckpointError: on every rank, when local ranks are not like that.
    """
    answers = channel.gather((local_rank, mp_rank, uuid.uuid4().hex), "the local rank of each rank")
    nodes: list[list[int]] = []
    for rank, (local, _, _) in enumerate(answers):
        if local == 0:
            nodes.append([])
        if not nodes or len(nodes[-1]) != local:
            raise CheckpointError(
                "checkpoint.use_node_local_storage needs ranks of a node to follow each other, with local ranks from 0;"
                f" local ranks are, by rank: {[answer[0] for answer in answers]}. Start the job with a launcher that"
                " sets LOCAL_RANK like that, or write to storage that all nodes share"
            )
        nodes[-1].append(rank)
    here = next(node for node in nodes if channel.rank in node)
    first = next(rank for rank in here if answers[rank][1] == mp_rank)
    return FolderSharing(channel.rank, tuple(here), channel.rank == first, answers[0][2])
