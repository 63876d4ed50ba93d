"""Requests to the token ids their engine will see: chat template, then tokenizer, with the known head remembered.

An agent's turn sends its whole history again. The rendered text is cut at the template's special tokens, which no
merge crosses, and the ids of each piece are kept by its text: a turn tokenizes what it added.
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes
from tokenizers import Tokenizer

from router.errors import BadRequest, ConfigError
from router.wire.openai import Endpoint, InferenceRequest

#: Rendered text whose token ids are remembered, per model.
MAX_REMEMBERED_CHARS = 64 * 1024 * 1024
#: What a template's own expressions raise on values they were not made for.
_TEMPLATE_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class ChatTemplate:
    """A Hugging Face chat template, rendered as ``transformers`` and the engines render it."""

    def __init__(self, source: str, *, variables: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self._takes_parts = _loops_over_content(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not parse: {error}") from error
        self._variables = dict(variables)

    def render(self, fields: Mapping[str, Any]) -> str:
        """The prompt text of a chat request. Raises ``BadRequest`` if the template refuses the messages."""
        extra = fields.get("chat_template_kwargs")
        values = {
            **self._variables,
            "documents": fields.get("documents"),
            "add_generation_prompt": fields.get("add_generation_prompt", True),
            **(extra if isinstance(extra, Mapping) else {}),
            "messages": [_plain(message, keep_parts=self._takes_parts) for message in fields["messages"]],
            "tools": fields.get("tools") or None,
        }
        try:
            return self._template.render(values)
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", param="messages") from error


class PromptTokenizer:
    """One model's tokenizer and template. Any thread may encode: the pieces' memory has a lock."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._cut = _special_token_cut(tokenizer)
        self._pieces: OrderedDict[str, array[int]] = OrderedDict()
        self._remembered_chars = 0
        self._lock = threading.Lock()

    @classmethod
    def from_files(cls, tokenizer_json: bytes, config: Mapping[str, Any]) -> PromptTokenizer:
        """Build from a ``tokenizer.json`` and the ``tokenizer_config.json`` that stands beside it."""
        try:
            tokenizer = Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:
            raise ConfigError(f"tokenizer.json cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        source = config.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
        variables = {
            name: token if isinstance(token, str) else str(token.get("content", ""))
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if isinstance(token := config.get(name), str | Mapping)
        }
        return cls(tokenizer, ChatTemplate(source, variables=variables) if source else None)

    def encode(self, request: InferenceRequest) -> array[int] | None:
        """Token ids of the request's prompt; None where it has no single prompt or the model no chat template."""
        if request.endpoint is Endpoint.CHAT:
            if self._template is None:
                return None
            return self._encode_rendered(self._template.render(request.fields))
        prompt = request.fields.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return array("I", self._tokenizer.encode(prompt, add_special_tokens=True).ids)
        if (
            isinstance(prompt, list)
            and prompt
            and all(isinstance(token, int) and 0 <= token < 2**32 for token in prompt)
        ):
            return array("I", prompt)
        return None

    def _encode_rendered(self, text: str) -> array[int]:
        if self._cut is None:
            return array("I", self._tokenizer.encode(text, add_special_tokens=False).ids)
        ids: array[int] = array("I")
        for piece in self._cut.split(text):
            if piece:
                ids.extend(self._encode_piece(piece))
        return ids

    def _encode_piece(self, piece: str) -> array[int]:
        with self._lock:
            known = self._pieces.get(piece)
            if known is not None:
                self._pieces.move_to_end(piece)
                return known
        ids = array("I", self._tokenizer.encode(piece, add_special_tokens=False).ids)
        with self._lock:
            if piece not in self._pieces:
                self._remembered_chars += len(piece)
            self._pieces[piece] = ids
            while self._remembered_chars > MAX_REMEMBERED_CHARS:
                oldest, _ = self._pieces.popitem(last=False)
                self._remembered_chars -= len(oldest)
        return ids


def _special_token_cut(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """A pattern that cuts *around* special tokens, or None if pieces would not tokenize as in the whole.

    ``tokenizers`` itself splits at such tokens before anything else, and normalizes, pre-tokenizes and merges what lies
    between them piece by piece. What looks beyond a piece: a prefix for the *first* one, and added tokens that share
    characters with the cut or look at the words beside them. Texts of such tokenizers are not cut.
    """
    description = json.loads(tokenizer.to_str())
    if '"prepend_scheme": "first"' in json.dumps(description.get("pre_tokenizer")):
        return None
    added = description.get("added_tokens", ())
    plain = [
        token["content"]
        for token in added
        if token["special"] and not (token["lstrip"] or token["rstrip"] or token["single_word"] or token["normalized"])
    ]
    others = [token["content"] for token in added if token["content"] not in plain]
    if not plain or any(token["single_word"] for token in added):
        return None
    if any(_overlap(cut, other) for cut in plain for other in others):
        return None
    return re.compile("(" + "|".join(map(re.escape, sorted(plain, key=len, reverse=True))) + ")")


def _overlap(cut: str, other: str) -> bool:
    """Whether a text can hold both so that they share characters: then the one that comes first hides the other."""
    if cut in other or other in cut:
        return True
    shorter = min(len(cut), len(other))
    return any(other.endswith(cut[:size]) or cut.endswith(other[:size]) for size in range(1, shorter))


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``: marks what training learns from; in a prompt it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _loops_over_content(template: nodes.Template) -> bool:
    """Whether the template itself walks a message's list of parts. vLLM decides alike what to give it."""

    def is_content(node: nodes.Node) -> bool:
        match node:
            case nodes.Filter(node=nodes.Expr() as inner):
                return is_content(inner)
            case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
                return True
            case nodes.Name(name=name):
                return name in named
        return False

    named: set[str] = set()
    for assigned in template.find_all(nodes.Assign):
        if isinstance(assigned.target, nodes.Name) and is_content(assigned.node):
            named.add(assigned.target.name)
    return any(is_content(loop.iter) for loop in template.find_all(nodes.For))


def _plain(message: Mapping[str, Any], *, keep_parts: bool) -> Mapping[str, Any]:
    """A message as engines hand it to a template: no content is empty content, and parts that the template does not
    walk itself are one string, joined by line breaks.
    """
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if keep_parts or not isinstance(content, list):
        return message
    texts = (part.get("text", "") if isinstance(part, Mapping) else part for part in content)
    return {**message, "content": "\n".join(map(str, texts))}


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
