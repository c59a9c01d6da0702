"""Skip-gram with negative sampling: vectors of words by which each one finds the words around it.

Mikolov et al., "Distributed Representations of Words and Phrases and their Compositionality" (NIPS 2013), equation 4:
the product of a word's vector with that of a word near it is the logit of the task, and products with the vectors of
`negatives` other words are logits of the label 0. A word has two vectors, in the rows of two slots. Vectors of several
slots of the word add up, as n-grams do in Bojanowski et al., "Enriching Word Vectors with Subword Information" (2017).

Negatives are words near the other words of the batch, so no row is fetched for them. Each has the weight
share ** (power - 1), and is in the batch as often as in the stream, so it is drawn like share ** power. The
share is that of `ItemFrequency`. Draws are torch's, whose seed comes from the job's, the pass and the rank.

Shapes: B samples, D length of a vector, N negatives of a sample, P positive samples.
"""

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from headrace.trainer.models.contract import Inputs, Shape, Targets
from headrace.trainer.models.layers import sequence_vector
from headrace.trainer.models.settings import SkipGramSettings
from headrace.trainer.models.two_tower import ItemFrequency


class SkipGram(nn.Module):
    """The product of a word's vector and that of a word near it. All that it learns is in rows."""

    for_losses = ("word", "context")

    def __init__(self, shape: Shape, settings: SkipGramSettings) -> None:
        super().__init__()
        self._settings, self._context, self._tasks = settings, settings.context or "", shape.tasks
        word = settings.word(shape)
        self._pooled, self._sequences = ([slot.name for slot in each] for each in (word.pooled, word.sequences))
        self.frequency = ItemFrequency(settings.frequency_buckets, settings.frequency_memory)
        self._better_BN: Tensor | None = None

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits by task, and both vectors for `losses`."""
        parts = [inputs.vectors[name] for name in self._pooled]
        parts += [sequence_vector(inputs.sequences[name]) for name in self._sequences]
        word_BD = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
        context_BD = inputs.vectors[self._context]
        logit_B = (word_BD * context_BD).sum(1)
        return {**dict.fromkeys(self._tasks, logit_B), "word": word_BD, "context": context_BD}

    def losses(self, outputs: dict[str, Tensor], inputs: Inputs, targets: Targets) -> dict[str, Tensor]:
        """The log loss of the negatives of each positive sample of the first task; 0 for the others."""
        sign_B = targets.sign_B[self._context]
        share_B = self.frequency.log_share(sign_B, learn=torch.is_grad_enabled()).exp()
        drawn_BN = self._drawn(share_B ** (self._settings.power - 1))
        own_BN = sign_B[drawn_BN] == sign_B.unsqueeze(1)
        word_BD, context_BD = outputs["word"].float(), outputs["context"].float()
        score_BN = torch.bmm(context_BD[drawn_BN], word_BD.unsqueeze(2)).squeeze(2)
        with torch.no_grad():
            better_BN = ((word_BD * context_BD).sum(1, keepdim=True) > score_BN).float()
            self._better_BN = better_BN.masked_fill(own_BN, torch.nan)
        lost_B = functional.softplus(score_BN).masked_fill(own_BN, 0.0).sum(1)
        return {"negatives": torch.where(targets.label_B[self._tasks[0]] > 0, lost_B, 0.0)}

    def measures(self, outputs: dict[str, Tensor], inputs: Inputs, targets: Targets) -> dict[str, Tensor]:
        """Of the negatives of positive samples, as `losses` drew them, those with a lower score than the right word."""
        better_BN, self._better_BN = self._better_BN, None
        if better_BN is None:
            return {}
        better = better_BN[targets.label_B[self._tasks[0]] > 0]
        return {"better_than_negatives": better[~better.isnan()]}

    def _drawn(self, weight_B: Tensor) -> Tensor:
        """(B, N): by sample, the places of the batch whose words are its negatives."""
        size = len(weight_B), self._settings.negatives
        return torch.multinomial(weight_B, size[0] * size[1], replacement=True).view(size)
