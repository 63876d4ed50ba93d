"""A template whose loop over messages can go on behind those that were rendered before.

Most chat templates write messages one by one: what a message becomes follows from itself, its neighbours, what was
assigned before the loop and what the loop keeps in namespaces. Such a loop is rewritten, so that it asks
``rendered_heads`` for the text of its first messages, goes through the rest, and tells after the last ones how far it
got. Where a loop may depend on anything else, it stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Final, TypeVar

from jinja2 import nodes

from router.wire.template_analysis import is_of, names_of_lists

Kind = TypeVar("Kind", bound=nodes.Node)

#: What depends on nothing but its arguments. A template's own macros are looked into.
_PURE: Final = frozenset({"dict", "namespace", "raise_exception", "range"})
_IMPURE: Final = frozenset({"cycler", "joiner", "lipsum", "self", "strftime_now"})
_BEHIND: Final = frozenset({"first", "index", "index0", "previtem"})
_AHEAD: Final = frozenset({"last", "nextitem"})
#: Where ``rendered_heads`` puts what it tells a loop.
_DONE, _REST, _BEFORE, _MARKED, _STATE = range(5)
_OTHERS: Final = (nodes.Block, nodes.Extends, nodes.FromImport, nodes.Import, nodes.Include)


def make_resumable(template: nodes.Template) -> bool:
    """Rewrite the loops of a parsed template that write messages; whether there is one."""
    macros = [node for node in template.body if isinstance(node, nodes.Macro)]
    if any(_some(kind, template) for kind in _OTHERS):
        return False
    if len({macro.name for macro in macros}) < len(_all_of(nodes.Macro, template)):  # conditional ones, or one of two
        return False
    lists = names_of_lists(template)
    places = list(_top_level(template.body))
    assigned = {name for body in places for node in body for name in _assigned(node)}
    spaces = {name for body in places for node in body for name in _assigned(node) if _makes_namespace(node)}
    number = 0
    for body in places:
        for place, node in reversed(list(enumerate(body))):
            if isinstance(node, nodes.For) and any(is_of(node.iter, name) for name in lists):
                loop = _Loop(node, macros, lists=lists, assigned=assigned, spaces=spaces)
                if loop.can_resume():
                    number += 1
                    body[place : place + 1] = loop.rewritten(number)
    return number > 0


class _Loop:
    """A loop over messages, and what it depends on."""

    def __init__(
        self,
        loop: nodes.For,
        macros: Sequence[nodes.Macro],
        *,
        lists: Set[str],
        assigned: Set[str],
        spaces: Set[str],
    ) -> None:
        self._loop = loop
        self._macros = macros
        self._lists = lists
        self._spaces = spaces
        self._used = {name.name for name in _all_of(nodes.Name, *loop.body, *macros)}
        self._names = sorted((self._used & assigned) - spaces - lists)
        self._reads = list(_own(loop.body, _is_loop_value))
        self._ahead = int(any(value.attr in _AHEAD for value in self._reads if isinstance(value, nodes.Getattr)))

    def can_resume(self) -> bool:
        """Whether its text follows from what is known of it."""
        loop, body, macros = self._loop, self._loop.body, self._macros
        if loop.test or loop.else_ or loop.recursive or not isinstance(loop.target, nodes.Name):
            return False
        if not _some(nodes.Output, *body) or _some(nodes.CallBlock, *body, *macros):
            return False
        if self._used & _IMPURE or any(map(_is_random, _all_of(nodes.Filter, *body, *macros))):
            return False
        called = {call.node.name for call in _all_of(nodes.Call, *body, *macros) if isinstance(call.node, nodes.Name)}
        if called - _PURE - {macro.name for macro in macros}:
            return False
        return self._reads_messages_by_place() and self._reads_loop_by_name() and self._keeps_to_attributes()

    def _reads_messages_by_place(self) -> bool:
        """The lists themselves are only read item by item, and by the loop itself."""
        names = [name for name in _all_of(nodes.Name, *self._loop.body) if name.name in self._lists]
        by_place = [node for part in self._loop.body for node in _walk(part) if self._is_at(node)]
        in_macros = {name.name for name in _all_of(nodes.Name, *self._macros)}
        return len(names) == len(by_place) and not in_macros & self._lists

    def _reads_loop_by_name(self) -> bool:
        """Of ``loop`` only what a rest of the items can tell is read, and nothing in the heads of inner loops."""
        own = list(_own(self._loop.body, lambda node: _is_name(node, "loop")))
        inner = [
            part
            for loop in _all_of(nodes.For, *self._loop.body)
            for part in (loop.iter, loop.test, *loop.else_)
            if part is not None
        ]
        if any(_is_name(node, "loop") for part in inner for node in _walk(part)):
            return False
        return len(own) == len(self._reads) and all(
            isinstance(value, nodes.Getattr) and value.attr in _BEHIND | _AHEAD for value in self._reads
        )

    def _keeps_to_attributes(self) -> bool:
        """Namespaces from before the loop are read and set by attribute; macros set none."""
        parts = (*self._loop.body, *self._macros)
        local = {name.name for name in _all_of(nodes.Name, *parts) if name.ctx == "store"}
        if _some(nodes.NSRef, *self._macros):
            return False
        if any(ref.name not in self._spaces and ref.name not in local for ref in _all_of(nodes.NSRef, *parts)):
            return False
        names = [name for name in _all_of(nodes.Name, *parts) if name.name in self._spaces]
        return len(names) == len(self._attributes_read())

    def _attributes_read(self) -> list[tuple[str, str]]:
        parts = (*self._loop.body, *self._macros)
        return [
            (node.node.name, node.attr)
            for node in _all_of(nodes.Getattr, *parts)
            if isinstance(node.node, nodes.Name) and node.node.name in self._spaces
        ]

    def _is_at(self, node: nodes.Node) -> bool:
        return (
            isinstance(node, nodes.Getitem)
            and isinstance(node.node, nodes.Name)
            and node.node.name in self._lists
            and not isinstance(node.arg, nodes.Slice)
        )

    def rewritten(self, number: int) -> list[nodes.Node]:
        """What stands in its place."""
        loop, known = self._loop, f"_homing_known_{number}"
        written = sorted({(ref.name, ref.attr) for ref in _all_of(nodes.NSRef, *loop.body) if ref.name in self._spaces})
        read = set(self._attributes_read())
        state = [_attribute_if_any(name, attr) for name, attr in written]
        depends = [
            *map(_load, self._names),
            *(_is_defined(name) for name in sorted({name for name, _ in read | {*written}})),
            *(_attribute_if_any(name, attr) for name, attr in sorted(read | {*written})),
        ]

        def of_known(place: int) -> nodes.Expr:
            return nodes.Getitem(_load(known), nodes.Const(place), "load")

        restored: list[nodes.Node] = [
            nodes.Assign(nodes.NSRef(name, attr), of_known(_STATE + place))
            for place, (name, attr) in enumerate(written)
        ]

        def shifted(node: nodes.Node, is_inner: bool) -> nodes.Node | None:
            if self._is_at(node):
                assert isinstance(node, nodes.Getitem)
                return _call("_homing_at", node.node, _replaced(node.arg, shifted, is_inner=is_inner))
            if _is_loop_value(node) and not is_inner:
                assert isinstance(node, nodes.Getattr)
                first = _attribute("loop", "first")
                if node.attr in ("index", "index0"):
                    return nodes.Add(node, of_known(_DONE))
                if node.attr == "first":
                    return nodes.And(node, nodes.Not(of_known(_DONE)))
                if node.attr == "previtem":
                    return nodes.CondExpr(nodes.And(first, of_known(_DONE)), of_known(_BEFORE), node)
            return None

        done = nodes.Add(_attribute("loop", "index"), of_known(_DONE))
        mark = nodes.Output([_call("_homing_mark", done, nodes.Const(self._ahead), *state)])
        is_marked = nodes.Compare(done, [nodes.Operand("gteq", of_known(_MARKED))])
        body = [*(_replaced(node, shifted) for node in loop.body), nodes.If(is_marked, [mark], [], [])]
        made: list[nodes.Node] = [
            nodes.Assign(nodes.Name(known, "store"), _call("_homing_resume", nodes.Const(number), loop.iter, *depends)),
            *([nodes.If(of_known(_DONE), restored, [], [])] if restored else []),
            nodes.For(loop.target, of_known(_REST), body, [], None, False),
        ]
        for node in made:
            node.set_lineno(loop.lineno)
        return made


# --- trees ------------------------------------------------------------------------------------------------


def _top_level(body: list[nodes.Node]) -> Iterator[list[nodes.Node]]:
    """The lists of nodes that are written straight into the prompt."""
    yield body
    for node in body:
        if isinstance(node, nodes.If):
            for part in (node, *node.elif_):
                yield from _top_level(part.body)
            yield from _top_level(node.else_)


def _assigned(node: nodes.Node) -> set[str]:
    if not isinstance(node, nodes.Assign | nodes.AssignBlock):
        return set()
    return {name.name for name in _all_of(nodes.Name, node.target)}


def _makes_namespace(node: nodes.Node) -> bool:
    return (
        isinstance(node, nodes.Assign) and isinstance(node.node, nodes.Call) and _is_name(node.node.node, "namespace")
    )


def _walk(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in node.iter_child_nodes():
        yield from _walk(child)


def _own(body: Sequence[nodes.Node], chosen: Callable[[nodes.Node], bool]) -> Iterator[nodes.Node]:
    """Nodes of a loop's body, but for those in inner loops."""
    for node in body:
        if chosen(node):
            yield node
        if not isinstance(node, nodes.For):
            yield from _own(list(node.iter_child_nodes()), chosen)


def _all_of(kind: type[Kind], *parts: nodes.Node) -> list[Kind]:
    return [node for part in parts for node in _walk(part) if isinstance(node, kind)]


def _replaced(
    node: nodes.Node, replacement: Callable[[nodes.Node, bool], nodes.Node | None], *, is_inner: bool = False
) -> nodes.Node:
    """The tree with replacements for some of its nodes, which are told whether they stand in an inner loop."""
    if (other := replacement(node, is_inner)) is not None:
        return other
    is_inner = is_inner or isinstance(node, nodes.For)
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, name, _replaced(value, replacement, is_inner=is_inner))
        elif isinstance(value, list):
            parts = (
                _replaced(part, replacement, is_inner=is_inner) if isinstance(part, nodes.Node) else part
                for part in value
            )
            setattr(node, name, list(parts))
    return node


def _some(kind: type[nodes.Node], *parts: nodes.Node) -> bool:
    return bool(_all_of(kind, *parts))


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _is_random(one: nodes.Filter) -> bool:
    """By chance, itself or through another filter: ``map('random')``."""
    return one.name == "random" or any(value.value == "random" for value in _all_of(nodes.Const, one))


def _is_loop_value(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Getattr) and _is_name(node.node, "loop")


def _load(name: str) -> nodes.Name:
    return nodes.Name(name, "load")


def _attribute(name: str, attribute: str) -> nodes.Getattr:
    return nodes.Getattr(_load(name), attribute, "load")


def _is_defined(name: str) -> nodes.Test:
    return nodes.Test(_load(name), "defined", [], [], None, None)


def _attribute_if_any(name: str, attribute: str) -> nodes.CondExpr:
    """Undefined where there is no namespace: one of another branch, or of later on."""
    return nodes.CondExpr(_is_defined(name), _attribute(name, attribute), None)


def _call(name: str, *arguments: nodes.Node) -> nodes.Call:
    return nodes.Call(_load(name), list(arguments), [], None, None)
