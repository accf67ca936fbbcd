"""Loading a model to look at: the built-in one, a folder, or a name of the hub; safetensors, and no code of others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, FileError, MissingPackageError

__all__ = ["BUILTIN", "UNTRAINED", "LoadedModel", "TokenizedText", "load"]

BUILTIN, UNTRAINED = "builtin", "builtin-untrained"
_EMPTY = "inspect: the text is empty; give at least a word."


@dataclass(frozen=True)
class TokenizedText:
    """A text as a model reads it: the arguments of its call, and the text of each token."""

    inputs: dict[str, Tensor]
    pieces: list[str]
    cut: int = 0  # tokens at the end that the model has no positions for


@dataclass(frozen=True)
class LoadedModel:
    """A model, and how it reads a text.

    >>> model = load(None)
    >>> model.read("to be or not to be").pieces[2:4]
    [' be', ' or']
    """

    name: str
    model: nn.Module
    read: Callable[[str], TokenizedText]
    layers: int

    @torch.no_grad()
    def run(self, reading: TokenizedText) -> None:
        """Let the model read, for those who watch."""
        self.model(**reading.inputs)


def load(name: str | None, *, remote_code: bool = False, device: str = "cpu") -> LoadedModel:
    """Load a model by the folder it lies in or by its name on the hub; without a name, the built-in one.

    Weights come from safetensors, or from torch files read with weights_only. Code that comes with a model runs only
    with `remote_code`.
    """
    if name is None or name in (BUILTIN, UNTRAINED):
        return _builtin(name or BUILTIN, device)
    if Path(name).is_file():
        raise FileError(
            f"load: {name!r} is a file; a model is the folder that holds config.json, or a name of the hub."
        )
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise FileError(f"load: the folder {name!r} has no config.json; give a folder that save_pretrained wrote.")
    return _from_transformers(name, remote_code, device)


def _builtin(name: str, device: str) -> LoadedModel:
    from .builtin import load as stored
    from .builtin import tokenizer

    model, words = stored(trained=name == BUILTIN).to(device), tokenizer()

    def read(text: str) -> TokenizedText:
        if not text.strip():
            raise ArgumentError(_EMPTY)
        ids = words.encode(text)
        return TokenizedText({"ids": torch.tensor([ids], device=device)}, words.pieces(ids))

    return LoadedModel(name, model, read, len(model.blocks))


def _from_transformers(name: str, remote_code: bool, device: str) -> LoadedModel:
    try:
        import transformers
    except ImportError as missing:
        raise MissingPackageError(
            f"load: {name!r} needs the package transformers: pip install 'regard[hf]'. Without a model, "
            f"the built-in one is looked at."
        ) from missing
    from safetensors import SafetensorError

    from .huggingface import register

    register()
    shared = {"trust_remote_code": remote_code}
    try:
        with _quiet(transformers):
            config = transformers.AutoConfig.from_pretrained(name, **shared)
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, **shared)
            model = _made(transformers, config).from_pretrained(
                name, config=config, attn_implementation="regard", weights_only=True, **shared
            )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, UnpicklingError, SafetensorError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        close = "".join(f"Did you mean {one}? " for one in get_close_matches(name, (BUILTIN, UNTRAINED), n=1))
        raise FileError(
            f"load: {name!r} could not be loaded: {first} {close}Give a folder with config.json, a tokenizer and "
            f"safetensors, or a name that the hub knows; code of the model's own runs only with --trust-remote-code."
        ) from error
    model = model.to(device).eval()
    layers = int(getattr(config, "num_hidden_layers", 0) or 0)
    return LoadedModel(name, model, lambda text: _read(tokenizer, config, text, device), layers)


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without the bars and warnings of transformers: what goes wrong is told by us."""
    logs = transformers.utils.logging
    level, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    before = hub.level
    hub.setLevel(logging.ERROR)
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        hub.setLevel(before)
        logs.set_verbosity(level)
        if bars:
            logs.enable_progress_bar()


def _made(transformers: Any, config: Any) -> Any:
    """The kind of model that the weights were stored from, where transformers can tell."""
    kinds = " ".join(getattr(config, "architectures", None) or ())
    if "CausalLM" in kinds or "LMHeadModel" in kinds:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModel


def _read(tokenizer: Any, config: Any, text: str, device: str) -> TokenizedText:
    asked = {"return_offsets_mapping": tokenizer.is_fast, "return_special_tokens_mask": True}
    read = tokenizer(text, **asked, return_tensors="pt")
    ids, marks = read["input_ids"][0], read.pop("special_tokens_mask")[0]
    if not text.strip() or bool(marks.all()):  # marks such as [CLS] alone are no text
        raise ArgumentError(_EMPTY)
    offsets = read.pop("offset_mapping")[0].tolist() if tokenizer.is_fast else [(0, 0)] * len(ids)
    names = tokenizer.convert_ids_to_tokens(ids.tolist())
    pieces = [text[a:b] if b > a else name for (a, b), name in zip(offsets, names, strict=True)]
    limit = getattr(config, "max_position_embeddings", None) or len(ids)
    inputs = {key: x[:, :limit].to(device) for key, x in read.items() if isinstance(x, Tensor)}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    return TokenizedText(inputs, pieces[:limit], max(0, len(pieces) - limit))
