"""What a checked value was refused for, in words that ask for no knowledge of the checker."""

from __future__ import annotations

import re
from typing import Final

from pydantic_core import ErrorDetails

_WORDS: Final = {
    "model_type": "a mapping of names and values is needed",
    "model_attributes_type": "a mapping of names and values is needed",
    "dict_type": "a mapping of names and values is needed",
    "tuple_type": "a list is needed",
    "list_type": "a list is needed",
    "string_type": "text is needed",
    "path_type": "the path of a file is needed",
    "bool_type": "allowed: true, false",
    "bool_parsing": "allowed: true, false",
    "int_type": "a whole number is needed",
    "int_parsing": "a whole number is needed",
    "int_from_float": "a whole number is needed",
    "float_type": "a number is needed",
    "float_parsing": "a number is needed",
    "finite_number": "a finite number is needed",
    "missing": "it is missing",
    "extra_forbidden": "nothing has this name",
}


def what_is_allowed(details: ErrorDetails) -> str:
    """The rule that a value broke, as the end of a sentence. Holds nothing of the value itself."""
    kind, context = details["type"], details.get("ctx", {})
    if kind in _WORDS:
        return _WORDS[kind]
    if kind == "enum":
        return f"allowed: {context['expected']}"
    if kind == "string_pattern_mismatch":
        pattern: str = context["pattern"]
        choice = re.fullmatch(r"\^\(([\w|]+)\)\$", pattern)
        return f"allowed: {', '.join(choice[1].split('|'))}" if choice else f"it must look like {pattern}"
    message = details["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
    return message[:1].lower() + message[1:]


def masked(text: str) -> str:
    """Text of an address without the name and password in it, whether or not it is a proper URL."""
    return re.sub(r"((?:^|['\"])(?:\w+:/*)?|//)[^'\"\s]*@", r"\1***@", text)
