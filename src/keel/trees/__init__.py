"""Parse trees: where they come from (``sources``), tokens under them (``align``), what a model reads of them (``chunks``)."""

from keel.trees.align import prefix_chunks, sentence_chunks, token_spans
from keel.trees.build import BuildPlan, build
from keel.trees.cache import TreeCache
from keel.trees.chunks import Chunks, collate, fixed_chunks
from keel.trees.sources import TreeSource, open_source
from keel.trees.tree import Span, Tree

__all__ = [
    "BuildPlan",
    "Chunks",
    "Span",
    "Tree",
    "TreeCache",
    "TreeSource",
    "build",
    "collate",
    "fixed_chunks",
    "open_source",
    "prefix_chunks",
    "sentence_chunks",
    "token_spans",
]
