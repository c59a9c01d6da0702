"""W1 by others, on a GPU or on two threads of a CPU.

Plain PyTorch, and FBGEMM's table-batched embeddings (TBE) where its wheel is installed.
`python -m tests.bench.gpu_peers --kind torch --npz F --hidden 64 --device cuda` prints one JSON object. Both have all
rows on the device and all samples in the host's memory: no admission, no ageing, no commit, no stream.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tests.bench.w1 import NUM_DENSE, NUM_FIELDS, VOCAB

BATCH, WARM_UP, DIM = 4096, 20, 16
"""Samples of a step, steps before the clock starts, and length of a vector."""


class Net(nn.Module):
    """The layers of W1 above the vectors."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        sizes = [NUM_FIELDS * DIM + NUM_DENSE, hidden, hidden, hidden]
        layers = [part for a, b in zip(sizes, sizes[1:], strict=False) for part in (nn.Linear(a, b), nn.ReLU())]
        self.deep, self.wide = nn.Sequential(*layers, nn.Linear(hidden, 1)), nn.Linear(NUM_DENSE, 1)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """(B,) logits."""
        return (self.deep(torch.cat([vectors, dense], 1)) + self.wide(dense)).squeeze(1)


def plain_torch(device: str) -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
    """Vectors of ids, and the step of their optimizer: nn.Embedding with sparse gradients and Adagrad."""
    table = nn.Embedding(sum(VOCAB), DIM, sparse=True, device=device)
    nn.init.uniform_(table.weight, -0.01, 0.01)
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.05)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return lambda ids: table(ids).flatten(1), step


def tbe(device: str) -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
    """FBGEMM's: one table, Adagrad inside the backward pass."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    gpu = device == "cuda"
    place = EmbeddingLocation.DEVICE if gpu else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if gpu else ComputeDevice.CPU
    rows = [(sum(VOCAB), DIM, place, compute)]
    table = SplitTableBatchedEmbeddingBagsCodegen(
        rows, feature_table_map=[0] * NUM_FIELDS, optimizer=EmbOptimType.EXACT_ADAGRAD, learning_rate=0.05
    )
    table.init_embedding_weights_uniform(-0.01, 0.01)
    offsets = torch.arange(NUM_FIELDS * BATCH + 1, device=device)
    return lambda ids: table(ids.t().reshape(-1), offsets), lambda: None


KINDS = {"torch": plain_torch, "tbe": tbe}


def run(kind: str, npz: Path, hidden: int, device: str, steps: int) -> dict[str, float]:
    """Samples a second."""
    torch.manual_seed(1)
    if device == "cpu":
        torch.set_num_threads(2)
    data = np.load(npz)
    dense, label = torch.from_numpy(data["dense"]), torch.from_numpy(data["label"])
    ids = torch.from_numpy(data["ids"].astype(np.int64) + data["offsets"][None])
    vectors_of, learn_rows = KINDS[kind](device)
    net = Net(hidden).to(device)
    optimizer, loss_of = torch.optim.Adam(net.parameters(), lr=1e-3), nn.BCEWithLogitsLoss()
    begin = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            _ended(device)
            begin = time.perf_counter()
        at = step % (len(label) // BATCH) * BATCH
        moved = (each[at : at + BATCH].to(device, non_blocking=True) for each in (dense, ids, label))
        dense_B, ids_B, label_B = moved
        loss = loss_of(net(dense_B, vectors_of(ids_B)), label_B)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learn_rows()
    _ended(device)
    return {"samples_per_s": steps * BATCH / (time.perf_counter() - begin), "loss": float(loss)}


def _ended(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--kind", choices=list(KINDS), required=True)
    arguments.add_argument("--npz", type=Path, required=True)
    arguments.add_argument("--hidden", type=int, default=64)
    arguments.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments.add_argument("--steps", type=int, default=150)
    given = arguments.parse_args()
    print(json.dumps(run(given.kind, given.npz, given.hidden, given.device, given.steps)))
