"""What a template's source tells of what it does with messages."""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes


def walks_parts(template: nodes.Template) -> bool:
    """Whether the template loops over a message's list of parts. vLLM's rule (``renderers/hf.py``): over the content of
    a message, over a macro's parameter that is given one, or over whatever is named ``content`` outside of macros.
    """
    messages = names_of_message(template)
    in_macros: set[int] = set()
    for macro in template.find_all(nodes.Macro):
        given = _parameters_given_content(template, macro, messages)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if isinstance(loop.iter, nodes.Name) and loop.iter.name in given:
                return True
    return any(
        any(is_of(loop.iter, name, "content") for name in messages)
        or (isinstance(loop.iter, nodes.Name) and loop.iter.name == "content" and id(loop) not in in_macros)
        for loop in template.find_all(nodes.For)
    )


def names_of_lists(template: nodes.Template) -> set[str]:
    """``messages``, and names that something of it is assigned to."""
    lists = {"messages"}
    while True:
        more = {
            assigned.target.name
            for assigned in template.find_all(nodes.Assign)
            if isinstance(assigned.target, nodes.Name) and any(is_of(assigned.node, name) for name in lists)
        }
        if more <= lists:
            return lists
        lists |= more


def names_of_message(template: nodes.Template) -> set[str]:
    """Names that stand for one message: targets of loops over its lists."""
    lists = names_of_lists(template)
    return {
        loop.target.name
        for loop in template.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(is_of(loop.iter, name) for name in lists)
    }


def _parameters_given_content(template: nodes.Template, macro: nodes.Macro, messages: set[str]) -> set[str]:
    names = [parameter.name for parameter in macro.args]
    given: set[str] = set()
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            arguments: Iterator[tuple[str, nodes.Expr]] = zip(names, call.args, strict=False)
            named = ((keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in names)
            for parameter, argument in (*arguments, *named):
                if any(is_of(argument, message, "content") for message in messages):
                    given.add(parameter)
    return given


def is_of(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is the variable ``name``, or its ``key``; through filters, tests and slices."""
    match node:
        case nodes.Filter(node=inner) | nodes.Test(node=inner) | nodes.Getitem(node=inner, arg=nodes.Slice()):
            return is_of(inner, name, key)
        case nodes.Getattr(node=inner, attr=attribute) if key is not None:
            return attribute == key and is_of(inner, name) and isinstance(inner, nodes.Name)
        case nodes.Getitem(node=inner, arg=nodes.Const(value=attribute)) if key is not None:
            return bool(attribute == key) and is_of(inner, name) and isinstance(inner, nodes.Name)
        case nodes.Name(name=found, ctx="load"):
            return key is None and found == name
    return False
