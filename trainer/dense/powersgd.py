"""PowerSGD: the gradient of a matrix travels as the product of two narrow matrices, summed over ranks one by one.

M is a rank's gradient of n x m and its residual. With Q, m x r, whose columns are orthonormal:

    P = sum of M Q over ranks, made orthonormal;  Q = sum of M^T P over ranks;  all learn P Q^T

The next step begins with this Q, made orthonormal (warm start). A rank keeps what its own part lacks, M - P (M^T P)^T,
as its residual (error feedback). Parameters that would not get smaller are summed as they are.

Source: Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019. Residuals belong to ranks; on another number of ranks each
begins with an equal part of their sum. Q is the same on all ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headrace.config import MAX_FLOAT32
from headrace.seeds import derive
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.dense.flat_parameters import FlatParameters, within
from headrace.trainer.dense.gradient_sums import CompleteSums, all_reduce_of
from headrace.trainer.dense.rank_tensors import RESIDUAL, RankTensors
from headrace.trainer.dense_config import DenseSection, PowerSgdSection

PREFIX = "powersgd."
"""Before the name of a parameter, in commits: its Q."""


class Matrix(NamedTuple):
    """A parameter whose gradient is compressed; its first dimension is that of rows, others are columns."""

    name: str
    begin: int
    """Its first float in the flat buffer."""
    rows: int
    columns: int

    def of(self, flat: Tensor) -> Tensor:
        """(rows, columns): a view of a flat buffer."""
        return flat[self.begin : self.begin + self.rows * self.columns].view(self.rows, self.columns)


def matrices_of(parameters: Mapping[str, nn.Parameter], rank: int) -> list[Matrix]:
    """The parameters of a flat buffer whose narrow matrices are smaller than they are."""
    found = []
    for name, each in parameters.items():
        rows = each.shape[0] if each.dim() > 1 else 1
        columns = each.numel() // rows if rows else 0
        if rank * (rows + columns) < rows * columns:
            found.append(Matrix(name, int(each.storage_offset()), rows, columns))
    return found


def orthonormal(matrix: Tensor) -> Tensor:
    """(rows, columns), rows >= columns: orthonormal columns that span those of `matrix`, and others if they are fewer.

    By Householder reflections, so that a matrix of zeros gives unit vectors, and power iteration goes on from these.
    """
    found: Tensor = torch.linalg.qr(matrix).Q.contiguous()  # as a commit holds it, and a restart reads it
    return found


class PowerSgdSums(CompleteSums):
    """Sums of gradients compressed by PowerSGD."""

    def __init__(self, flat: FlatParameters, ranks: Ranks, config: DenseSection, seed: int) -> None:
        gradient = flat.gradient
        super().__init__(flat, ranks, config, seed)
        rank = (config.powersgd or PowerSgdSection()).rank
        self._all_reduce = all_reduce_of(ranks, config)
        self._matrices = matrices_of(flat.parameters, rank)
        self._plain = _between(self._matrices, len(gradient))
        longest = max((max(each.rows, each.columns) for each in self._matrices), default=1)
        self._largest = MAX_FLOAT32 / ranks.world / longest
        """Of a number of a gradient with its residual: no product or sum is larger than float32 holds."""
        self.residual = torch.zeros_like(gradient)
        self.of_ranks = RankTensors({RESIDUAL: self.residual}, ranks, keeps_sum=True)
        self._right = {each.name: _first(each, rank, seed).to(gradient.device) for each in self._matrices}
        """Q by parameter."""
        self._left: list[Tensor] = []
        self._own_right: list[Tensor] = []
        self._sums = torch.zeros(0)
        self._wait: Callable[[], None] | None = None

    def _prepare(self) -> bool:
        """Add the residual to the gradient."""
        return within(self._gradient.add_(self.residual), self._largest)

    def begin(self, loss_scale: float) -> None:
        """Sums P, and what is not compressed."""
        super().begin(loss_scale)
        narrow = [each.of(self._gradient) @ self._right[each.name] for each in self._matrices]
        self._sums = torch.cat([*(each.view(-1) for each in narrow), *(self._gradient[at] for at in self._plain)])
        self._wait = self._all_reduce(self._sums)

    def wait(self) -> None:
        """Then sums Q."""
        if self._wait is None:
            return
        self._wait()
        self._wait = None
        shapes = [(each.rows, self._right[each.name].shape[1]) for each in self._matrices]
        parts, plain = _parts(self._sums, shapes)
        for at in self._plain:
            self._gradient[at], plain = plain[: at.stop - at.start], plain[at.stop - at.start :]
        self._left = [orthonormal(part) for part in parts]
        matrices = zip(self._matrices, self._left, strict=True)
        self._own_right = [each.of(self._gradient).T @ left for each, left in matrices]
        if self._matrices:
            self._sums = torch.cat([each.reshape(-1) for each in self._own_right])
            self._all_reduce(self._sums)()

    def result(self) -> None:
        for at in self._plain:
            self.residual[at] = 0  # that of another compression, before
        shapes = [self._right[each.name].shape for each in self._matrices]
        rights, _ = _parts(self._sums, shapes)
        for each, left, own, right in zip(self._matrices, self._left, self._own_right, rights, strict=True):
            whole = each.of(self._gradient)
            torch.sub(whole, left @ own.T, out=each.of(self.residual))
            torch.mm(left, right.T, out=whole)
            self._right[each.name] = orthonormal(right)
        self._left, self._own_right = [], []

    def tensors(self) -> dict[str, Tensor]:
        """Q of each parameter."""
        return {PREFIX + name: each for name, each in self._right.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """A Q of another shape is left out; a residual of another compression goes on."""
        super().load(tensors)
        for name, own in self._right.items():
            saved = tensors.get(PREFIX + name)
            if saved is not None and saved.shape == own.shape:
                own.copy_(saved)


def _between(matrices: Sequence[Matrix], num_floats: int) -> list[slice]:
    """The parts of a flat buffer that are in no matrix."""
    edges = [
        0,
        *(edge for each in matrices for edge in (each.begin, each.begin + each.rows * each.columns)),
        num_floats,
    ]
    return [slice(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]


def _first(matrix: Matrix, rank: int, seed: int) -> Tensor:
    """The first Q of a parameter."""
    draw = torch.Generator().manual_seed(derive(seed, "powersgd", matrix.name))
    return orthonormal(torch.randn(matrix.columns, rank, generator=draw))


def _parts(flat: Tensor, shapes: Sequence[Sequence[int]]) -> tuple[list[Tensor], Tensor]:
    """Matrices of these shapes, views of a flat tensor from its beginning; and the rest of it."""
    found = []
    for rows, columns in shapes:
        found.append(flat[: rows * columns].view(rows, columns))
        flat = flat[rows * columns :]
    return found, flat
