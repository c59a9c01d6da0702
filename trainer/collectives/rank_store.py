"""The key-value store through which collectives of several trainers find each other. Rank 0 serves it.

The trainers learn its address at the launcher's rendezvous.
"""

import socket
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed has them without types

from headrace.address import address_of, format_address, parse_address
from headrace.deadline import Deadline
from headrace.errors import Unavailable
from headrace.rpc.rendezvous import RendezvousClient


def meet_trainers(
    client: RendezvousClient, rank: int, world: int, inputs: Mapping[str, str], interface: str, wait_s: float
) -> Store | None:
    """Come to the rendezvous; the store of `world` trainers, or None for one trainer. Rank 0 serves it at `interface`.

    `inputs`: digests of the files that this trainer reads. Raises SpecError where they differ from the head's, Refused,
    Unavailable, DeadlineExceeded.
    """
    deadline = Deadline.after(wait_s)
    if world == 1:
        client.meet("", inputs, deadline)
        return None
    if rank == 0:
        host = address_of(interface)
        store = serve_store(host, wait_s)
        client.meet(format_address(host, store.port), inputs, deadline)
        return store
    return connect_store(client.meet("", inputs, deadline), wait_s)


def serve_store(host: str, wait_s: float) -> TCPStore:
    """A store that listens at a free port of `host` alone; torch by itself would listen on every interface."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=wait_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect_store(address: str, wait_s: float) -> TCPStore:
    """The store at `address`. Raises Unavailable."""
    host, port = parse_address(address)
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=wait_s))
    except RuntimeError as error:
        raise Unavailable(f"the store of trainer-0 at {address} is not reachable: {error}") from error
