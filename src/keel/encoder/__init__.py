"""The DSTG encoder: semantic, absolute-position and relative-position streams apart, and its three NeoBERT baselines.

config = DstgConfig(position="dstg")                       # or "rope", "ap", "rp"
model = DstgForMaskedLM(config); model.save_pretrained(folder); AutoModelForMaskedLM.from_pretrained(folder)
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from keel.encoder.config import DstgConfig, count_parameters
from keel.encoder.heads import (
    DstgForMaskedLM,
    DstgForQuestionAnswering,
    DstgForSequenceClassification,
    DstgForTokenClassification,
)
from keel.encoder.model import DstgModel

AutoConfig.register("dstg", DstgConfig)
AutoModel.register(DstgConfig, DstgModel)
AutoModelForMaskedLM.register(DstgConfig, DstgForMaskedLM)
AutoModelForSequenceClassification.register(DstgConfig, DstgForSequenceClassification)
AutoModelForTokenClassification.register(DstgConfig, DstgForTokenClassification)
AutoModelForQuestionAnswering.register(DstgConfig, DstgForQuestionAnswering)

__all__ = [
    "DstgConfig",
    "DstgForMaskedLM",
    "DstgForQuestionAnswering",
    "DstgForSequenceClassification",
    "DstgForTokenClassification",
    "DstgModel",
    "count_parameters",
]
