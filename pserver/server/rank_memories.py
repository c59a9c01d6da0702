"""The memory that each rank shares with this shard, where the arrays of its calls lie beside the messages."""

import logging
from collections import deque
from collections.abc import Sequence

from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol.frames import beside
from headrace.rpc import data_sockets
from headrace.rpc.data_sockets import MemoryOffer, SharedMemory

MAX_MEMORIES = 4
"""Most memories of one rank, which has one for each connection; beyond it the oldest is forgotten."""

log = logging.getLogger(__name__)


class RankMemories:
    """Any thread may call `open`; the thread of the sockets uses the memories."""

    def __init__(self, num_ranks: int) -> None:
        self._memories: list[deque[SharedMemory]] = [deque(maxlen=MAX_MEMORIES) for _ in range(num_ranks)]

    def open(self, rank: int, offer: MemoryOffer) -> bool:
        """Open the memory that a rank offers. False: messages must carry its arrays."""
        try:
            self._memories[rank].append(SharedMemory.open(offer))
        except OSError as error:
            log.info("no memory is shared with rank %d, whose arrays come in messages: %s", rank, error)
            return False
        return True

    def forget(self) -> None:
        """Let go of all memories, after the last call: threads of gRPC may keep this object for a while."""
        for memories in self._memories:
            memories.clear()

    def find(self, rank: int, frames: Sequence[memoryview]) -> tuple[SharedMemory, list[memoryview]]:
        """The memory with the arrays of a call, and the arrays; `frames` are those of its message.

        Raises InvalidShardCall.
        """
        number = next((data_sockets.number_of(places) for places in frames), None)
        for memory in self._memories[rank].copy():
            if memory.number == number:
                return memory, beside(memory, frames)
        raise InvalidShardCall(f"rank {rank} shares no memory with this shard in which these arrays may lie")
