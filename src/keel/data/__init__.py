"""Data: corpora, tokenizers, token streams, and windows on them."""

from keel.data.corpora import Corpus, CorpusConfig, Document, load_corpus, read_documents
from keel.data.masking import MaskedCorpus, MaskedWindows, with_mask_tokens
from keel.data.tasks import TaskData
from keel.data.tokenizers import load_tokenizer, train_bpe
from keel.data.tokens import TokenCorpus, TokenStream, tokenize_corpus
from keel.data.windows import Segment, SlidingWindows, evaluation_segments

__all__ = [
    "Corpus",
    "CorpusConfig",
    "Document",
    "MaskedCorpus",
    "MaskedWindows",
    "Segment",
    "SlidingWindows",
    "TaskData",
    "TokenCorpus",
    "TokenStream",
    "evaluation_segments",
    "load_corpus",
    "load_tokenizer",
    "read_documents",
    "tokenize_corpus",
    "train_bpe",
    "with_mask_tokens",
]
