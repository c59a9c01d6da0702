"""Copies between the memory of the host and that of a trainer's device, which make the host wait as little as may be.

On a GPU a plain copy waits until the GPU has done all that it was asked to do. So arrays go there from pinned memory,
and the host goes on: torch keeps that memory until the copy is done. What is asked for by `later` comes after one
wait, all of it. Where the device is the CPU nothing is copied. Not yet run on a GPU.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def writable(values: NDArray[Any]) -> NDArray[Any]:
    """`values`, or a copy if they are read-only, as in a batch from Arrow; torch warns about read-only arrays."""
    return values if values.flags.writeable else values.copy()


def sent(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, for what is asked of it from now on. On the CPU the tensor may share the array's memory:
    then the array must stay as it is as long as the tensor is read; elsewhere only until this returns."""
    tensor = torch.from_numpy(writable(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Later:
    """A tensor of a step, which the host reads later."""

    def __init__(self, bring: Callable[[], None]) -> None:
        """`bring` fills `array`."""
        self._bring = bring
        self._array: NDArray[Any] | None = None

    def arrived(self, array: NDArray[Any]) -> None:
        """It is on the host."""
        self._array = array

    @property
    def array(self) -> NDArray[Any]:
        """On the host."""
        if self._array is None:
            self._bring()
        assert self._array is not None, "it comes with the others"
        return self._array


class DeviceCopies:
    """The copies of one trainer. `send` is for any thread, the rest for that of the steps."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._ahead: dict[int, tuple[NDArray[Any], Callable[[], Tensor]]] = {}
        """By the identity of arrays, which are held, so that no other array has it."""
        self._awaited: list[tuple[Later, Tensor]] = []

    # --- to the device

    def send(self, array: NDArray[Any]) -> Callable[[], Tensor]:
        """Begin to copy an array on a stream of its own, beside the steps. The result gives the tensor, for the stream
        of the steps, which then waits for the copy; the host does not."""
        if self._stream is None:
            return partial(sent, array, self.device)
        with torch.cuda.stream(self._stream):
            tensor = sent(array, self.device)
            done = self._stream.record_event()
        return partial(_arrived, tensor, done)

    def ahead(self, arrays: Iterable[NDArray[Any]]) -> None:
        """Send arrays of the next batch, which `there` then has; those of the batch before are dropped."""
        if self.device.type != "cpu":
            once = {id(array): array for array in arrays}
            self._ahead = {place: (array, self.send(array)) for place, array in once.items()}

    def there(self, array: NDArray[Any]) -> Tensor:
        """The array on the device."""
        found = self._ahead.get(id(array))
        return sent(array, self.device) if found is None else found[1]()

    # --- to the host

    def later(self, tensor: Tensor) -> Later:
        """Have a tensor come to the host when the first of those that shall come is read. Nothing may change it."""
        found = Later(self._bring)
        self._awaited.append((found, tensor.detach()))
        return found

    def _bring(self) -> None:
        awaited, self._awaited = self._awaited, []
        coming = [(each, tensor.to("cpu", non_blocking=True)) for each, tensor in awaited]  # torch pins their memory
        wait_for(self.device)
        for each, tensor in coming:
            each.arrived(tensor.numpy())


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what it was asked to do by this thread."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _arrived(tensor: Tensor, done: torch.cuda.Event) -> Tensor:
    stream = torch.cuda.current_stream(tensor.device)
    stream.wait_event(done)
    tensor.record_stream(stream)
    return tensor
