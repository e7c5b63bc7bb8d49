"""From a recipe to data and models: the corpus as tokens, a seeded model of an arm, hosts of equal parameter counts."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from keel.data import (
    MaskedCorpus,
    TaskData,
    TokenCorpus,
    load_corpus,
    load_tokenizer,
    tokenize_corpus,
    train_bpe,
    with_mask_tokens,
)
from keel.data.languages import LANGUAGES
from keel.encoder import DstgConfig, DstgForMaskedLM, count_parameters
from keel.errors import KeelError, build_config
from keel.hosts import HostShape
from keel.model import KeelForCausalLM, attach
from keel.streams import stream_from_config
from keel.training.adapters import add_adapters
from keel.training.sections import DEFAULT_SCALE, Recipe
from keel.training.shadow import add_shadow

_OF_A_RUN = re.compile(r"runs/(.+)\.(\w+)/\w+/seed\d+/\w+/?")


def run_that_makes(checkpoint: str) -> str | None:
    """Return the command of the run that leaves a checkpoint there (``runs/RECIPE.SCALE/ARM/seed0/host``), where it is not there yet."""
    found = _OF_A_RUN.fullmatch(checkpoint)
    if found is None or Path(checkpoint).exists():
        return None
    return f"keel run {found[1]}" + ("" if found[2] == DEFAULT_SCALE else f" --scale {found[2]}")


def load_data(recipe: Recipe) -> TokenCorpus | TaskData:
    """Return what a recipe's arms learn: its text as tokens, or its task.

    Raises: KeelError for bad text, or a tokenizer or host that another recipe is to train and has not yet.
    """
    wanted = recipe.data.tokenizer
    lent = {"host.checkpoint": recipe.host.get("checkpoint"), "data.tokenizer.pretrained": wanted and wanted.pretrained}
    for where, checkpoint in lent.items():
        command = None if checkpoint is None else run_that_makes(str(checkpoint))
        if command is not None:
            raise KeelError(
                f"{where} {checkpoint} is not there; it is trained by another recipe, from this folder: {command}"
            )
    task = recipe.data.task
    if task is None:
        return load_tokens(recipe)
    language = build_config(LANGUAGES[task.language], task.options, "data.task.options")
    return TaskData(language, train_samples=task.train_samples, valid_samples=task.valid_samples)


def load_tokens(recipe: Recipe) -> TokenCorpus:
    """Read the corpus of a recipe and return it as tokens; both are cached by content.

    Raises: KeelError for bad text.
    """
    wanted = recipe.data.tokenizer
    assert wanted is not None
    corpus = load_corpus(recipe.data.corpus_config())
    masking = recipe.data.masking
    prepare = None if masking is None else with_mask_tokens
    if wanted.pretrained:
        tokenizer = load_tokenizer(wanted.pretrained, prepare)
    else:
        tokenizer = train_bpe(corpus, wanted.bpe or 0)
        tokenizer = tokenizer if prepare is None else prepare(tokenizer)
    tokens = tokenize_corpus(corpus, tokenizer)
    return tokens if masking is None else MaskedCorpus.of(tokens, masking.rate)


def build_model(
    recipe: Recipe,
    arm: str,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    width: int | None = None,
    trained_host: Path | None = None,
) -> KeelForCausalLM | DstgForMaskedLM:
    """Return the untrained model of ``arm``; host and streams depend on ``seed`` alone. An encoder is the whole model.

    Args:
        width: the host's feed-forward size, from ``matched_widths``; None leaves the recipe's.
        trained_host: model folder of the arm that ``host_of`` names.
    Raises: KeelError for a checkpoint that cannot be loaded or does not fit the tokenizer.
    """
    torch.manual_seed(seed)
    config = recipe.host_config(arm)
    if trained_host is not None:
        host = KeelForCausalLM.from_pretrained(trained_host).detach()
    elif config is None:
        host = _host_from_checkpoint(str(recipe.host["checkpoint"]), len(tokenizer))
    else:
        _set_vocabulary(config, tokenizer)
        if width is not None:
            setattr(config, _width_field(config), width)
        if isinstance(config, DstgConfig):
            return AutoModelForMaskedLM.from_config(config)
        host = AutoModelForCausalLM.from_config(config)
    streams = {
        name: stream_from_config(fields, f"arms.{arm}.streams.{name}")
        for name, fields in recipe.streams_of(arm).items()
    }
    model = attach(host, streams, positions=recipe.positions_at(arm, recipe.train_window(arm)))
    adapters = recipe.arms[arm].adapters
    if adapters is not None:
        add_adapters(model.host, adapters)
    shadow = recipe.arms[arm].shadow
    if shadow is not None:
        add_shadow(model.host, shadow)
    return model


def matched_widths(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Return the feed-forward size of every trained arm's host, such that their totals agree with the largest arm's.

    Agreement is to the nearest whole channel of the feed-forward. Where the recipe as a whole does not match parameters, an arm agrees
    with the one that its ``match_parameters_of`` names, and any other has None.
    """
    matched = {arm: recipe.arms[arm].match_parameters_of for arm in recipe.trained_arms()}
    if recipe.host_config() is None or not (recipe.match_parameters or any(matched.values())):
        return dict.fromkeys(recipe.trained_arms())
    configs = {arm: recipe.host_config(arm) for arm in recipe.trained_arms()}
    totals, channels = {}, {}
    for arm, config in configs.items():
        assert config is not None
        _set_vocabulary(config, tokenizer)
        shape = HostShape(hidden_size=config.hidden_size, num_layers=config.num_hidden_layers)
        host = _count_host(config, _width(config))
        totals[arm] = host + _count_streams(recipe, arm, shape)
        channels[arm] = _count_host(config, _width(config) + 1) - host
    most = max(totals.values())

    def width(arm: str) -> int | None:
        model = matched[arm]
        if not recipe.match_parameters and model is None:
            return None
        goal = most if model is None else totals[model]
        return _width(configs[arm]) + round((goal - totals[arm]) / channels[arm])

    return {arm: width(arm) for arm in configs}


def _host_from_checkpoint(name: str, vocabulary: int) -> PreTrainedModel:
    try:
        host, loading = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # the libraries below raise OSError, ValueError, KeyError and their own kinds
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise KeelError(
            f"host.checkpoint {name!r} cannot be loaded: {reason}; give a folder or a name on the Hub"
        ) from error
    if loading["missing_keys"]:
        absent = sorted(loading["missing_keys"])
        raise KeelError(
            f"host.checkpoint {name!r}: {len(absent)} weights are missing, {absent[0]!r} the first; copy it anew"
        )
    rows = host.get_input_embeddings().num_embeddings
    if vocabulary > rows:
        raise KeelError(
            f"host.checkpoint {name!r} has {rows} embeddings, the tokenizer {vocabulary} entries; set "
            "data.tokenizer.pretrained to the checkpoint's own"
        )
    return host


def _set_vocabulary(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    config.vocab_size = len(tokenizer)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    if isinstance(config, DstgConfig):
        ends = (tokenizer.cls_token_id, tokenizer.sep_token_id)
        config.special_token_ids = [int(token) for token in ends if token is not None]


def _width_field(config: PreTrainedConfig) -> str:
    return "n_inner" if config.model_type == "gpt2" else "intermediate_size"


def _width(config: PreTrainedConfig) -> int:
    return getattr(config, _width_field(config)) or 4 * config.hidden_size


def _count_host(config: PreTrainedConfig, width: int) -> int:
    config = copy.deepcopy(config)
    setattr(config, _width_field(config), width)
    if isinstance(config, DstgConfig):
        return count_parameters(config)
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def _count_streams(recipe: Recipe, arm: str, shape: HostShape) -> int:
    total = 0
    for fields in recipe.streams_of(arm).values():
        stream = stream_from_config(fields)
        stream.build(shape)
        total += sum(p.numel() for p in stream.parameters())
    return total
