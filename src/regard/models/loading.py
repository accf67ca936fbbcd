"""Load a model to inspect: the built-in one, a folder, or a model name from the hub; no remote code by default."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, FileError, MissingPackageError, RegardError

__all__ = ["BUILTIN", "UNTRAINED", "LoadedModel", "TokenizedText", "load", "random_weights_text"]

BUILTIN, UNTRAINED = "builtin", "builtin-untrained"
_VAGUE = re.compile(r"(model|weights|final|best|last|latest|output|checkpoint|step|epoch)s?[-_]?\d*|\d+", re.IGNORECASE)
_EMPTY = "inspect: the text is empty; give at least one word."


@dataclass(frozen=True)
class TokenizedText:
    """A text as input of a model: the arguments of its call, and the text of each token."""

    inputs: dict[str, Tensor]
    pieces: list[str]
    truncated: int = 0  # tokens dropped at the end, for which the model has no positions
    cut: int = 0  # tokens dropped at the end before that, because somebody set a limit

    def first(self, most: int) -> TokenizedText:
        """The first tokens, at most so many."""
        inputs = {name: x[:, :most] for name, x in self.inputs.items()}
        return replace(self, inputs=inputs, pieces=self.pieces[:most], cut=self.cut + max(0, len(self.pieces) - most))

    @property
    def given(self) -> int:
        """How many tokens the whole text has."""
        return len(self.pieces) + self.truncated + self.cut


@dataclass(frozen=True)
class LoadedModel:
    """A model and its tokenizer.

    >>> model = load(None)
    >>> model.tokenize("to be or not to be").pieces[2:4]
    [' be', ' or']
    """

    name: str
    model: nn.Module
    tokenize: Callable[[str], TokenizedText]
    layers: int
    trained_length: int | None = None  # tokens in the longest texts of its training, if known
    random_weights: tuple[str, ...] = ()  # those that its files lack, drawn at random
    tokenizer: Any = None  # that of transformers, or of the built-in model

    @property
    def title(self) -> str:
        """What to call the model: its name on the hub, or the name of its folder, not the path."""
        return folder_title(Path(self.name)) if Path(self.name).is_dir() else self.name

    @property
    def kind(self) -> str:
        """The class of the model, and the type that its config names, if it has one."""
        kind = getattr(getattr(self.model, "config", None), "model_type", "")
        name = type(self.model).__name__
        return f"{name} ({kind})" if isinstance(kind, str) and kind else name

    def limits(self, text: TokenizedText) -> str:
        """Say which tokens are left out, or from where on the model extrapolates; empty if the text is short enough."""
        if text.truncated:
            return f"the last {text.truncated:,} tokens are left out: the model has no positions for them"
        if self.trained_length is not None and len(text.pieces) > self.trained_length:
            length = f"{self.trained_length:,}"
            return f"the model extrapolates from position {length} on: it was trained on texts of up to {length} tokens"
        return ""

    def check_reads(self, who: str) -> None:
        """Raise an error of `who` if the model cannot read text."""
        self.run(self.tokenize("the"), who)

    @torch.no_grad()
    def run(self, text: TokenizedText, who: str = "inspect") -> None:
        """Call the model; what it computes is observed from outside."""
        try:
            self.model(**text.inputs)
        except RegardError:
            raise
        except Exception as error:  # models come from outside, and may raise anything
            if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
                tokens = f"{len(text.pieces):,} tokens"
                raise ArgumentError(f"{who}: there is not enough memory for {tokens}. Give a shorter text.") from error
            raise ArgumentError(
                f"{who}: {self.name!r} cannot read this text: {_one_line(error)} Check that its config.json, its "
                f"tokenizer and its weights belong together."
            ) from error


def folder_title(folder: Path) -> str:
    """What to call the model in a folder: the folder's name, or its parent's too if that alone says nothing.

    >>> folder_title(Path("/home/me/tiny-bert")), folder_title(Path("/runs/tiny-bert/checkpoint-500"))
    ('tiny-bert', 'tiny-bert/checkpoint-500')
    >>> folder_title(Path("/cache/models--org--name/snapshots/0123abc"))
    'org/name'
    """
    parts = folder.resolve().parts
    cached = next((part for part in reversed(parts) if part.startswith("models--")), None)
    if cached is not None:
        return "/".join(cached.split("--")[1:])
    return "/".join(parts[-2:] if _VAGUE.fullmatch(parts[-1]) else parts[-1:])


def load(
    name: str | None, *, remote_code: bool = False, random_weights: bool = False, device: str = "cpu"
) -> LoadedModel:
    """Load a model from a folder or by its name on the hub; without a name, the built-in one.

    Weights are read from safetensors, or from torch files with weights_only. Code that comes with a model runs only
    with `remote_code`. A model whose files lack weights is refused, unless `random_weights` allows random ones.
    """
    if name is None or name in (BUILTIN, UNTRAINED):
        return _builtin(name or BUILTIN, device)
    if Path(name).is_file():
        raise FileError(
            f"load: {name!r} is a file; give the folder that contains config.json, or a model name from the hub. A "
            f"text to read is an option: --file, or --texts."
        )
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise FileError(f"load: the folder {name!r} has no config.json; give a folder written by save_pretrained.")
    return _from_transformers(name, remote_code, random_weights, device)


def _builtin(name: str, device: str) -> LoadedModel:
    from .builtin import load as stored
    from .builtin import tokenizer

    model, words = stored(trained=name == BUILTIN).to(device), tokenizer()

    def tokenize(text: str) -> TokenizedText:
        if not text.strip():
            raise ArgumentError(_EMPTY)
        ids = words.encode(text)
        return TokenizedText({"ids": torch.tensor([ids], device=device)}, words.pieces(ids))

    return LoadedModel(name, model, tokenize, len(model.blocks), model.trained_length, tokenizer=words)


def _from_transformers(name: str, remote_code: bool, random_weights: bool, device: str) -> LoadedModel:
    try:
        import transformers
    except ImportError as missing:
        raise MissingPackageError(
            f"load: {name!r} needs the package transformers: pip install 'regard[hf]'. Without a model name, "
            f"the built-in model is used."
        ) from missing

    from .huggingface import register

    register()
    shared = {"trust_remote_code": remote_code}
    with _quiet(transformers):
        with _load_errors(name):
            config = transformers.AutoConfig.from_pretrained(name, **shared)
        with _load_errors(name, "the tokenizer of "):
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, **shared)
            words = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
        if len(words) < 2:  # transformers makes a tokenizer without words if the files are not there
            raise FileError(
                f"load: {name!r} has no tokenizer. Save it beside the model with tokenizer.save_pretrained(folder)."
            )
        with _load_errors(name):
            model, report = _auto_class(transformers, config).from_pretrained(
                name,
                config=config,
                attn_implementation="regard",
                weights_only=True,
                ignore_mismatched_sizes=True,  # they are in the report
                output_loading_info=True,
                **shared,
            )
    drawn = _random_weights(report)
    if drawn and not random_weights:
        raise FileError(
            f"load: {name!r} cannot be judged: {random_weights_text(drawn)}. Check that the weights belong to this "
            f"config.json; --allow-random-weights inspects it all the same."
        )
    layers = getattr(config, "num_hidden_layers", 0)
    return LoadedModel(
        name,
        model.to(device).eval(),
        partial(_tokenized, transformers, tokenizer, config, device),
        layers if isinstance(layers, int) else 0,
        random_weights=drawn,
        tokenizer=tokenizer,
    )


def _random_weights(report: dict[str, Any]) -> tuple[str, ...]:
    """The weights that transformers drew at random, those of a pooler aside: it comes after all attention."""
    mismatched = {key[0] if isinstance(key, tuple) else key for key in report.get("mismatched_keys") or ()}
    names = mismatched | set(report.get("missing_keys") or ())
    return tuple(sorted(name for name in names if "pooler" not in name.split(".")))


def random_weights_text(names: Sequence[str]) -> str:
    """One clause about weights that were drawn at random.

    >>> random_weights_text(["a", "b", "c", "d"])
    "4 weights are not in the model's files, or have another shape there, and are random: a, b, c, …"
    """
    which = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    count = "1 weight is" if len(names) == 1 else f"{len(names):,} weights are"
    have, be = ("has", "is") if len(names) == 1 else ("have", "are")
    return f"{count} not in the model's files, or {have} another shape there, and {be} random: {which}"


@contextmanager
def _load_errors(name: str, part: str = "") -> Iterator[None]:
    """Turn whatever transformers raises about a model's files into one sentence."""
    try:
        yield
    except Exception as error:  # it reads files from outside, and may raise anything
        close = "".join(f"Did you mean {one}? " for one in get_close_matches(name, (BUILTIN, UNTRAINED), n=1))
        raise FileError(
            f"load: {part}{name!r} {_not_loaded(name, error)} {close}Give a folder with config.json, a "
            f"tokenizer and safetensors, or a model name from the hub; code in a model's folder runs only with "
            f"--trust-remote-code."
        ) from error


def _not_loaded(name: str, error: Exception) -> str:
    """Why a model could not be loaded."""
    text = str(error)
    if not Path(name).exists() and ("couldn't connect" in text or "offline" in text):
        return "was not found: there is no such folder, and the hub cannot be reached."
    if not Path(name).exists() and ("not a local folder" in text or "Repo id must" in text or "Incorrect path" in text):
        return "was not found: there is no such folder, and no such model on the hub."
    return f"could not be loaded: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    """An error's text on one line, at most 300 characters; with its type, unless it is an OSError."""
    text = " ".join(str(error).split())
    text = text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}"
    text = text if len(text) <= 300 else f"{text[:299]}…"
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silence the progress bars and warnings of transformers: we report errors ourselves."""
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


def _auto_class(transformers: Any, config: Any) -> Any:
    """The auto class for the architecture that the config names."""
    kinds = str(getattr(config, "architectures", None))
    if "CausalLM" in kinds or "LMHeadModel" in kinds:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModel


def _tokenized(transformers: Any, tokenizer: Any, config: Any, device: str, text: str) -> TokenizedText:
    wanted = {"return_offsets_mapping": tokenizer.is_fast, "return_special_tokens_mask": True}
    with _quiet(transformers):  # a text that is too long is cut, and we say so
        encoded = tokenizer(text, **wanted, return_tensors="pt")
    ids, special = encoded["input_ids"][0], encoded.pop("special_tokens_mask")[0]
    if not text.strip() or bool(special.all()):  # only special tokens such as [CLS]
        raise ArgumentError(_EMPTY)
    offsets = encoded.pop("offset_mapping")[0].tolist() if tokenizer.is_fast else [(0, 0)] * len(ids)
    names = tokenizer.convert_ids_to_tokens(ids.tolist())
    pieces = [text[a:b] if b > a else name for (a, b), name in zip(offsets, names, strict=True)]
    positions = getattr(config, "max_position_embeddings", None)
    limit = positions if isinstance(positions, int) and positions > 0 else len(ids)
    inputs = {key: x[:, :limit].to(device) for key, x in encoded.items() if isinstance(x, Tensor)}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    return TokenizedText(inputs, pieces[:limit], max(0, len(pieces) - limit))
