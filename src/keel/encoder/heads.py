"""The encoder with a head: masked language modelling, and classifiers of sequences, tokens and spans for fine-tuning.

Every head reads what the masked language model's head reads: the semantic stream, or with ``mlm_head="full"`` both.

Shapes: B batch, T tokens, R channels that the heads read, V vocabulary, C classes, N labelled tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import (
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from keel.encoder.config import DstgConfig
from keel.encoder.model import DstgModel, DstgPreTrainedModel, EncoderOutput
from keel.errors import ShapeError
from keel.ops.cross_entropy import IGNORED, cross_entropy_sum


class _WithHead(DstgPreTrainedModel):
    """The encoder, and what of its last state the heads read."""

    def __init__(self, config: DstgConfig) -> None:
        super().__init__(config)
        self.encoder = DstgModel(config)

    def _encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        document_starts: Tensor | None,
        output_hidden_states: bool,
    ) -> tuple[Tensor, EncoderOutput]:
        outputs = self.encoder(input_ids, attention_mask, position_ids, document_starts, output_hidden_states)
        return outputs.last_hidden_state[..., : self.config.readout_size], outputs


class DstgForMaskedLM(_WithHead):
    """Masked language modelling; the head reads the semantic stream alone (§3.3), so nothing pulls on the last positions."""

    def __init__(self, config: DstgConfig) -> None:
        super().__init__(config)
        self.decoder = nn.Linear(config.readout_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """Return the layer that makes logits."""
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the layer that makes logits."""
        self.decoder = new_embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_starts: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool = False,
    ) -> MaskedLMOutput:
        """Predict the tokens at masked places; the first arguments are those of ``DstgModel``.

        Args:
            labels: [B, T], the original token where one was masked, else -100. In training logits are made for these places
                alone and not returned: at a rate of 20 % that saves four fifths of the largest matrix product.
            num_items_in_batch: labelled tokens that the loss is divided by; None for those of this call.
        Returns: loss, nats a labelled token; logits, [B, T, V].
        """
        read_BTR, outputs = self._encode(input_ids, attention_mask, position_ids, document_starts, output_hidden_states)
        if labels is None or not self.training:
            logits = self.decoder(read_BTR)
            picked = logits
        else:
            logits = None
            chosen = labels != IGNORED
            picked, labels = self.decoder(read_BTR[chosen]), labels[chosen]
        loss = None
        if labels is not None:
            count = num_items_in_batch if num_items_in_batch is not None else (labels != IGNORED).sum().clamp(min=1)
            loss = cross_entropy_sum(picked.flatten(0, -2), labels.flatten(), divisor=count)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class DstgForSequenceClassification(_WithHead):
    """A class, or with one label a number, for each sequence, read at its first token as NeoBERT does."""

    def __init__(self, config: DstgConfig) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.dense = nn.Linear(config.readout_size, config.readout_size)
        self.classifier = nn.Linear(config.readout_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> SequenceClassifierOutput:
        """Return logits [B, C] and with ``labels`` ([B], long; float for one label) cross-entropy or squared error."""
        read_BTR, outputs = self._encode(input_ids, attention_mask, position_ids, None, output_hidden_states)
        first_B = _first_attended(input_ids, attention_mask)
        pooled_BR = read_BTR[torch.arange(len(input_ids), device=input_ids.device), first_B]
        pooled_BR = torch.tanh(self.dense(self.dropout(pooled_BR)))
        logits = self.classifier(self.dropout(pooled_BR))
        loss = None
        if labels is not None and self.config.num_labels == 1:
            loss = F.mse_loss(logits[:, 0].float(), labels.float())
        elif labels is not None:
            loss = F.cross_entropy(logits.float(), labels)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class DstgForTokenClassification(_WithHead):
    """A class for each token."""

    def __init__(self, config: DstgConfig) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.readout_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> TokenClassifierOutput:
        """Return logits [B, T, C] and with ``labels`` ([B, T], -100 where there is none) their mean cross-entropy."""
        read_BTR, outputs = self._encode(input_ids, attention_mask, position_ids, None, output_hidden_states)
        logits = self.classifier(self.dropout(read_BTR))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class DstgForQuestionAnswering(_WithHead):
    """First and last token of an answer inside the text."""

    def __init__(self, config: DstgConfig) -> None:
        super().__init__(config)
        self.qa_outputs = nn.Linear(config.readout_size, 2)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> QuestionAnsweringModelOutput:
        """Return start and end logits, [B, T] each, -inf-like where padded, and with both positions ([B], long) their mean loss.

        Raises: ShapeError when only one of the two positions is given.
        """
        if (start_positions is None) != (end_positions is None):
            raise ShapeError(
                "start_positions and end_positions: got one of the two; give both, [batch] each, or neither"
            )
        read_BTR, outputs = self._encode(input_ids, attention_mask, position_ids, None, output_hidden_states)
        logits = self.qa_outputs(read_BTR)
        if attention_mask is not None:
            logits = logits.masked_fill(attention_mask[..., None] == 0, torch.finfo(logits.dtype).min)
        start, end = logits.unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = (F.cross_entropy(start.float(), start_positions) + F.cross_entropy(end.float(), end_positions)) / 2
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start, end_logits=end, hidden_states=outputs.hidden_states
        )


def _first_attended(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the place of each row's first token, [B], which padding on the left moves."""
    if attention_mask is None:
        return torch.zeros(len(input_ids), dtype=torch.long, device=input_ids.device)
    return attention_mask.long().argmax(dim=1)
