"""What can be known in a moment to go wrong, and would else be found out after hours of training: files, trees, layers."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig

from keel.data.conllu import data_path
from keel.errors import naming
from keel.hosts import HostShape, host_shape
from keel.streams import TreeStream, stream_from_config
from keel.training import Recipe
from keel.training.section import named_in
from keel.trees.lookup import open_lookup
from keel.trees.sources import check_source


def check_before(recipe: Recipe) -> None:
    """Look whether what a recipe names is there.

    Raises: KeelError, beginning with the field, for a file that is missing, a source or lookup of trees that is none, or a stream that
        its host has no place for.
    """
    sections = {"evaluation": recipe.evaluation, "data.questions": recipe.data.questions, "trees": recipe.trees}
    for section, value in sections.items():
        for where, source in named_in(value, section):
            if not source.startswith("hub:"):
                with naming(where):
                    data_path(source)
    for name, source in ({} if recipe.trees is None else recipe.trees.sources).items():
        with naming(f"trees.sources.{name}"):
            check_source(source)
    for arm in recipe.arms:
        streams = recipe.streams_of(arm)
        shape = _shape(recipe, arm) if streams else None
        for name, fields in streams.items():
            with naming(f"arms.{arm}.streams.{name}"), torch.device("meta"):
                stream = stream_from_config(fields)
                if shape is not None:
                    stream.build(shape)
                if isinstance(stream, TreeStream) and stream.config.lookup is not None:
                    open_lookup(stream.config.lookup, stream.config.tree_scope)


def _shape(recipe: Recipe, arm: str) -> HostShape | None:
    """Return the sizes of an arm's host; None for an encoder, whose streams are its own, and for a checkpoint that is no folder here."""
    trained = recipe.arms[arm].weights_of or arm
    config: PreTrainedConfig | None = recipe.host_config(recipe.arms[trained].host_of or trained)
    if config is None and Path(recipe.host["checkpoint"]).is_dir():
        with contextlib.suppress(OSError, ValueError):  # loading it says better what is wrong
            config = AutoConfig.from_pretrained(recipe.host["checkpoint"], trust_remote_code=False)
    return host_shape(config) if config is not None and hasattr(config, "num_attention_heads") else None
