"""A user's perceptron, and one vector for each of many items: which one comes next is a softmax over all of them.

That is the first task. Further ones, of clicks or values, have a head each on the perceptron.

The weights of the items are parameters of the model with mode "full". Otherwise each rank has a slice of them
(trainer.collectives.divided_softmax), which is no part of the module; its dense strategy learns it
(trainer.dense.class_slices). Exports and prediction jobs build the model with all items.

Shapes: as in trainer.models.layers; N items, V length of a vector, K best items.
"""

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from headrace.trainer.collectives.divided_softmax import (
    ClassDraws,
    ClassRows,
    DividedSoftmax,
    Margins,
    cosines,
    initial_rows,
    probabilities,
    scores,
)
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.models.contract import Inputs, Shape, Targets
from headrace.trainer.models.layers import ChosenInput, Heads, Mlp, by_task
from headrace.trainer.models.linear import Linear
from headrace.trainer.models.settings import NextItemSettings


class NextItem(nn.Module):
    for_losses = ("user_vector", "items", "scores")
    served = ("items", "scores")
    """Outputs of an export beside the task: (B, K) numbers and cosines of the best items, the best one first."""

    def __init__(self, shape: Shape, settings: NextItemSettings) -> None:
        super().__init__()
        self._shape, self._settings = shape, settings
        self._task, *self._others = shape.tasks
        self._seed = torch.initial_seed()
        self._margins = Margins(settings.scale, settings.margin1, settings.margin2, settings.margin3)
        self._inputs = ChosenInput(shape, settings.user(shape))
        deep = Mlp(self._inputs.width, settings.hidden, 0.0)
        self.user = nn.Sequential(deep, Linear(deep.width, settings.dim))
        self.heads = Heads(deep.width, len(self._others), settings.towers) if self._others else None
        full = settings.mode == "full"
        rows = initial_rows(self._seed, settings.dim, 0, settings.classes) if full else None
        self.classes = nn.Parameter(torch.zeros(settings.classes, settings.dim) if rows is None else rows)
        self.class_rows: ClassRows | None = None
        """The slice of this rank, where items are divided over ranks."""
        self._softmax: DividedSoftmax | None = None
        self._better_B: Tensor | None = None

    def divide(self, ranks: Ranks, device: torch.device) -> None:
        """Keep this rank's part of the parameters, as the model is built."""
        given = self._settings
        if given.mode == "full":
            return
        del self.classes
        rows = ClassRows(given.classes, given.dim, ranks.rank, ranks.world, self._seed, device)
        draws = None
        if given.samples is not None:
            shares = probabilities(given.sampler, given.samples, given.classes, rows.begin, rows.end)
            draws = ClassDraws(shares, rows.begin, self._seed)
        self.class_rows = rows
        self._softmax = DividedSoftmax(rows, self._margins, ranks, draws, ranks_of_labels=bool(given.recall_at))

    def whole(self) -> nn.Module:
        """A copy with all parameters."""
        if self.class_rows is None:
            return self
        made = NextItem(self._shape, self._settings)
        made.load_state_dict(self.state_dict(), strict=False)
        return made

    def follow(self) -> None:
        if self._softmax is not None:
            self._softmax.follow()

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """While it learns, the user's vector for `losses`; else the probability of the best item, and the best ones."""
        deep_BH = self.user[0](self._inputs(inputs))
        user_BV = functional.normalize(self.user[1](deep_BH).float(), dim=1)
        others = {} if self.heads is None else by_task(self.heads(deep_BH), self._others)
        if torch.is_grad_enabled():
            return {self._task: user_BV.new_zeros(inputs.num_samples), **others, "user_vector": user_BV}
        cosine_BN = cosines(user_BV, self.classes)
        best_BK, item_BK = torch.topk(cosine_BN, self._settings.top, dim=1)
        log_sum_B = torch.logsumexp(cosine_BN * self._settings.scale, 1)
        probability_B = (best_BK[:, 0] * self._settings.scale - log_sum_B).exp()
        best = {"items": item_BK.float(), "scores": best_BK}
        return {self._task: probability_B, **others, "user_vector": user_BV, **best}

    def losses(self, outputs: dict[str, Tensor], inputs: Inputs, targets: Targets) -> dict[str, Tensor]:
        """The log loss of each sample's item, under the name of the task."""
        user_BV, class_B = outputs["user_vector"], targets.class_B[self._task]
        if self._softmax is not None:
            lost_B, self._better_B = self._softmax(user_BV, class_B)
            return {self._task: lost_B}
        at = torch.arange(len(class_B), device=class_B.device), class_B
        with torch.no_grad():
            cosine_BN = cosines(user_BV, self.classes)
            self._better_B = (cosine_BN > cosine_BN[at].unsqueeze(1)).sum(1)
            del cosine_BN
        score_BN = scores(user_BV, self.classes, at, self._margins)
        return {self._task: functional.cross_entropy(score_BN, class_B, reduction="none")}

    def measures(self, outputs: dict[str, Tensor], inputs: Inputs, targets: Targets) -> dict[str, Tensor]:
        """By name "recall_at_<k>", (P,): whether the item of a sample is among the k best of all, as `losses` saw."""
        better_B, self._better_B = self._better_B, None
        if better_B is None:
            return {}
        better_P = better_B[targets.weight_B[self._task] > 0]
        return {f"recall_at_{k}": (better_P < k).float() for k in self._settings.recall_at}
