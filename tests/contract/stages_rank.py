"""One rank of test_pipeline_on_gloo: trains a tower in stages, with 2 to 4 ranks, and compares it with the whole model.

Shapes: B samples, F slots, D length of a vector, C dense values, T tasks.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.nn import functional

from headrace.launcher_contact import LauncherContact
from headrace.rpc.rendezvous import RendezvousClient
from headrace.trainer.collectives.rank_store import meet_trainers
from headrace.trainer.collectives.ranks import SingleRank, TorchRanks
from headrace.trainer.config import ModelSection, TrainSection
from headrace.trainer.dense.all_reduce import AllReduceDense
from headrace.trainer.dense.pipeline import PipelineDense
from headrace.trainer.dense.strategy import Around
from headrace.trainer.dense_config import DenseSection, PipelineSection, RecomputeSection
from headrace.trainer.dense_optimizers import DenseAdam
from headrace.trainer.models.contract import Inputs, Shape, SlotShape
from headrace.trainer.models.registry import load_model
from headrace.trainer.train.mixed_precision import Precision
from headrace.trainer.train.pipeline_step import entered, stage_activations, stage_plan


@dataclass(frozen=True)
class Setting:
    """How batches pass through the stages."""

    pipeline: PipelineSection
    amp: str = "off"
    recompute: RecomputeSection | None = None


SETTINGS = {
    "one": Setting(PipelineSection(micro_batches=1, schedule="gpipe")),
    "gpipe": Setting(PipelineSection(micro_batches=4, schedule="gpipe")),
    "1f1b": Setting(PipelineSection(micro_batches=4, schedule="1f1b")),
    "recompute": Setting(PipelineSection(), recompute=RecomputeSection(segments=2)),
    "one block": Setting(PipelineSection(), recompute=RecomputeSection(blocks=("deep.2", "heads.towers.1"))),
    "amp": Setting(PipelineSection(), amp="bfloat16"),
    "amp, recompute": Setting(PipelineSection(), amp="bfloat16", recompute=RecomputeSection()),
    "float16": Setting(PipelineSection(), amp="float16"),
}
SCALE = 1024.0
SIZES = (12, 10, 12, 1)
"""Samples of each step: 4 micro-batches of 3, then padded ones."""
F, D, C, TASKS, KINDS = 3, 4, 5, ("ctr", "stay"), ("bce", "mse")
SHAPE = Shape(tuple(SlotShape(f"s{f}", D, True) for f in range(F)), (), (("d", C),), TASKS)
OPTIMIZER = DenseAdam(lr=0.01)


@dataclass
class Batch:
    """A batch, whose rows are leaves."""

    vectors_BFD: torch.Tensor
    first_order_BF: torch.Tensor
    dense_BC: torch.Tensor
    label_BT: torch.Tensor
    weight_BT: torch.Tensor

    @classmethod
    def of(cls, step):
        draw = torch.Generator().manual_seed(step)
        size = SIZES[step]
        vectors, first = torch.randn(size, F, D, generator=draw), torch.randn(size, F, generator=draw)
        dense, label = torch.randn(size, C, generator=draw), torch.rand(size, len(TASKS), generator=draw)
        weight = torch.rand(size, len(TASKS), generator=draw) / size
        return cls(vectors.requires_grad_(), first.requires_grad_(), dense, label.round(), weight)

    def inputs(self):
        vectors = {f"s{f}": self.vectors_BFD[:, f] for f in range(F)}
        return Inputs(vectors, self.vectors_BFD, self.first_order_BF, {}, self.dense_BC)


def model():
    torch.manual_seed(5)
    settings = {"hidden": [12, 10, 9, 8], "towers": [6]}
    return load_model(ModelSection(name="deepfm", settings=settings), SHAPE, Path("."))


def section(setting, strategy="pipeline"):
    clipped = {"clip_norm": 0.05, "optimizer": OPTIMIZER}
    if strategy != "pipeline":
        return DenseSection(strategy=strategy, **clipped)
    return DenseSection(strategy=strategy, pipeline=setting.pipeline, recompute=setting.recompute, **clipped)


def types_of(setting):
    return Precision(TrainSection(amp=setting.amp), torch.device("cpu")).forward


class Plain:
    """The whole model on this rank."""

    def __init__(self, setting):
        self.net, self.types = model(), types_of(setting)
        self.dense = AllReduceDense(self.net, section(setting, "all_reduce"), SingleRank())

    def learn(self, batch):
        self.dense.clear()
        with self.types():
            outputs = {name: each.float() for name, each in self.net(batch.inputs()).items()}
        ctr = functional.binary_cross_entropy_with_logits(outputs["ctr"], batch.label_BT[:, 0], reduction="none")
        stay = functional.mse_loss(outputs["stay"], batch.label_BT[:, 1], reduction="none")
        (torch.stack([ctr, stay], 1) * batch.weight_BT).sum().backward()
        gradients = {name: each.grad.clone() for name, each in self.net.named_parameters()}
        self.dense.step()
        return torch.stack([outputs[task] for task in TASKS], 1).detach(), gradients


class Divided:
    """This rank's stage."""

    def __init__(self, ranks, setting):
        self.net, types = model(), types_of(setting)
        self.ranks, self.scale = ranks, SCALE if setting.amp == "float16" else 1.0
        self.dense = PipelineDense(self.net, section(setting), ranks, around=Around(types=types))
        saved = stage_activations(self.net, self.dense.stage, section(setting), types)
        plan = stage_plan(self.dense.stage, setting.pipeline, KINDS, lambda: self.scale)
        self.tower, self.steps = self.net.tower(), ranks.stages(plan, ranks.world)
        self.surroundings = self.dense.stage.surroundings = entered(types, saved.forward)

    def learn(self, batch):
        """Logits, on rank 0, and the gradients of this rank's parameters before they are clipped."""
        self.dense.clear()
        logits = None
        if self.ranks.rank:
            self.steps.follow(len(batch.dense_BC))
        else:
            with self.surroundings():
                x_BW, beside_BT = self.tower.enter(batch.inputs())
            logits = self.steps.lead(x_BW, beside_BT, torch.cat([batch.label_BT, batch.weight_BT], 1))
        assert self.dense.finite()
        self.dense.after_backward(0, self.scale)
        gradients = {name: each.grad.clone() for name, each in self.net.named_parameters() if each.grad is not None}
        self.dense.wait()
        self.dense.step()
        return logits, gradients


def apart(found, wanted):
    return max((float((found[name] - wanted[name]).abs().max()) for name in found), default=0.0)


def said_of(ranks, setting, folder):
    plain, divided, worst = Plain(setting), Divided(ranks, setting), {"logits": 0.0, "gradients": 0.0, "rows": 0.0}
    fresh = divided.dense.digest()
    for step in range(len(SIZES)):
        if step == 2:  # as after a commit, with other ranks: what rank 0 has is all there is
            divided.dense.flush()
            whole = divided.dense.consolidate()
            if ranks.rank == 0:
                save_file({name: each.contiguous().clone() for name, each in whole.items()}, folder / "commit")
            ranks.broadcast({} if ranks.rank == 0 else None)
            digest, divided = divided.dense.digest(), Divided(ranks, setting)
            divided.dense.load(load_file(folder / "commit"))
            assert divided.dense.digest() == digest
        mine, theirs = Batch.of(step), Batch.of(step)
        logits, gradients = divided.learn(mine)
        wanted, all_gradients = plain.learn(theirs)
        worst["gradients"] = max(worst["gradients"], apart(gradients, all_gradients))
        if ranks.rank == 0:
            rows, their_rows = ({"v": b.vectors_BFD.grad, "f": b.first_order_BF.grad} for b in (mine, theirs))
            rows = {name: each / divided.scale for name, each in rows.items()}
            worst["logits"] = max(worst["logits"], apart({"": logits}, {"": wanted}))
            worst["rows"] = max(worst["rows"], apart(rows, their_rows))
    divided.dense.flush()
    whole = divided.dense.consolidate()
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in divided.net.parameters()}
    said = {"fresh": fresh, "digest": divided.dense.digest(), "worst": worst, "weight_bytes": sum(memory.values())}
    said["model_bytes"] = 4 * sum(each.numel() for each in plain.net.parameters())
    if ranks.rank == 0:
        commit = plain.dense.consolidate()
        said["names"], said["commit"] = sorted(whole) == sorted(commit), apart(whole, commit)
    return said


def main(rank, world, contact, folder):
    torch.set_num_threads(1)
    store = meet_trainers(RendezvousClient(LauncherContact(**json.loads(contact))), rank, world, {}, "lo", 60.0)
    said = {}
    for size in (1, 2, 3, 4):
        if rank >= size:
            continue
        own = dist.PrefixStore(f"of-{size}", store)
        ranks = SingleRank() if size == 1 else TorchRanks(rank, size, own, "lo", torch.device("cpu"), 60.0)
        said[size] = {name: said_of(ranks, setting, Path(folder)) for name, setting in SETTINGS.items()}
        said[size]["sent"] = sum(link["sent_bytes"] for link in ranks.links().values())
        ranks.close()
    print("said " + json.dumps(said), flush=True)
    store.set(f"over-{rank}", "")
    store.wait([f"over-{other}" for other in range(world)])  # rank 0 holds it


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
