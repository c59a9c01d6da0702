"""A device that is none: its tensors are on the CPU behind wrappers, and it notes each time the host waits for it.

Torch takes them for tensors of its device "meta", so the host cannot read them but by a copy, as those of a GPU. As on
a GPU the host waits at each plain copy in either direction, at each number that it reads, and where values say how many
elements a result has. Copies that do not block (`non_blocking`) are no wait; `trainer.device_copies.wait_for` is one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from headrace.trainer import device_copies

DEVICE = torch.device("meta")
CPU = torch.device("cpu")
READS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "equal"}
"""Operations whose result the host needs."""
COPIES = {"_to_copy": 0, "copy_": 1}
"""By name: which argument is copied."""


class OnDevice(Tensor):
    """A tensor of the device."""

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnDevice":
        return Tensor._make_wrapper_subclass(  # noqa: SLF001  # torch has no other way
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @property
    def data(self) -> "OnDevice":
        """As torch's; one that is set is a view of another tensor, as those of flat parameters are."""
        return OnDevice(self.held)

    @data.setter
    def data(self, value: "OnDevice") -> None:
        self.held = value.held

    def tolist(self) -> list:
        """As torch's, which does not know this class."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside the recording: it is of the thread that makes the steps")


class Recording(TorchDispatchMode):
    """While it lasts, the operations of this thread may use the device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        """Each wait of the host, in order."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func._overloadpacket.__name__
        uses = any(isinstance(each, OnDevice) for each in tree_leaves((args, kwargs)))
        goes = "device" in kwargs and kwargs["device"] is not None
        if goes:
            becomes = torch.device(kwargs["device"]).type == DEVICE.type
            kwargs["device"] = CPU
        else:
            becomes = uses
        if name in COPIES:
            target = becomes if name == "_to_copy" else isinstance(args[0], OnDevice)
            moves = target != isinstance(args[COPIES[name]], OnDevice)
            at_once = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            if moves and not at_once and tree_leaves(args)[COPIES[name]].dim():
                self.waits.append(f"{name} {'to' if target else 'from'} the device")
            becomes = target
        elif uses and name in READS:
            self.waits.append(name)
        found = func(*tree_map(held, args), **tree_map(held, kwargs))
        return tree_map(there, found) if becomes else found


def there(value):
    return OnDevice(value) if isinstance(value, Tensor) else value


def held(value):
    return value.held if isinstance(value, OnDevice) else value


@contextmanager
def recorded() -> Iterator[Recording]:
    """A context in which this thread may use the device."""
    with Recording() as recording:

        def wait(device: torch.device) -> None:
            if device.type == DEVICE.type:
                recording.waits.append("the step")

        with (
            patch.object(device_copies, "wait_for", wait),
            patch.object(Tensor, "pin_memory", lambda tensor: tensor),
        ):
            yield recording
