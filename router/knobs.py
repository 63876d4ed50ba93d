"""The tree of settings as paths: one knob a leaf."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from router.settings import Settings


class Knob(NamedTuple):
    """One leaf of the tree: its path, and the field that describes it."""

    path: tuple[str, ...]
    field: FieldInfo

    @property
    def key(self) -> str:
        """The path with dots, as errors and flags write it."""
        return ".".join(self.path)

    @property
    def is_secret(self) -> bool:
        """Never shown: not even when it is refused."""
        extra = self.field.json_schema_extra
        return isinstance(extra, dict) and extra.get("secret") is True

    @property
    def is_list(self) -> bool:
        """A tuple of values; a flag or variable separates them by commas."""
        return isinstance(self.field.default, tuple)


def knobs(model: type[BaseModel] = Settings, path: tuple[str, ...] = ()) -> Iterator[Knob]:
    """Every leaf setting, in the order in which they are declared."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from knobs(field.annotation, (*path, name))
        else:
            yield Knob((*path, name), field)
