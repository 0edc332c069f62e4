"""Jinja's immutable sandbox, in which a template pays for everything that it does.

The sandbox intercepts operators and calls. Loops, `~`, literals, slices and the text that is written go
through filters of ours instead. The results of Jinja's filters are paid, too; some of them, whose time grows faster
than their text, refuse to be called. Knows Jinja, not chats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import GeneratorType
from typing import Any

from jinja2 import Template, TemplateRuntimeError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from .render_budget import RenderBudget, TooCostly
from .spelled_json import to_json

# Names with a blank: no template can write them, and `map`, which takes names as texts, rejects them.
_BUDGET = "the budget"  # a variable
_EACH, _JOINED, _VALUE, _PART, _TEXT = "pay each", "pay joined", "pay value", "pay part", "pay text"  # filters
_PLAIN = "plain {}"  # Jinja's own filter of a name
_SLOW = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_NO_TEXT = ("encode", "decode", "to_bytes", "from_bytes")  # some codecs need the square of a text's length
_SPLITTING = frozenset({"list", "sort", "unique", "title"})  # filters that split a text into its characters or words
_WRITING = frozenset({"center", "format", "indent", "replace", "string"})
_INSERTING = frozenset({"append", "d", "default", "format", "join"})
_COUNTING = frozenset({"batch", "round", "slice"})
_WORD = re.compile(r"\w+")
_NONCHARACTER = re.compile(r"\\\\|\\u(?P<code>fd[de][0-9a-f])")  # in JSON; or a backslash


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment that `transformers` renders chat templates in, with a price for everything."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        plain: dict[str, Callable[..., Any]] = self.filters
        self.filters = {_PLAIN.format(name): filter for name, filter in plain.items()}
        self.filters |= {name: _make_refusing_filter(name) if name in _SLOW else _paid(name) for name in plain}
        self.filters |= {
            _EACH: pass_context(lambda context, items: _budget(context).each(items)),
            _JOINED: pass_context(_joined),
            _VALUE: pass_context(lambda context, made: _budget(context).value(made)),
            _PART: pass_context(lambda context, made: _budget(context).part(made)),
            _TEXT: pass_context(lambda context, made: _budget(context).text(made)),
            "sum": pass_context(_sum),
            "tojson": pass_context(_to_json),
            "wordcount": pass_context(_num_words),
        }

    def compiled(self, source: str) -> tuple[Template, tuple[str, ...], frozenset[str]]:
        """Compile a template whose every operation pays from a budget.

        Returns:
            The template, the texts that it writes, and those that it searches for in other texts.

        Raises:
            TemplateSyntaxError: it is not valid Jinja.
        """
        parsed = self.parse(source)
        constants = [constant.value for constant in parsed.find_all(nodes.Const)]
        written = [data.data for data in parsed.find_all(nodes.TemplateData)]
        sought = frozenset(_searched_texts(parsed))
        paid = _Paid().visit(parsed)
        paid.set_environment(self)
        return self.from_string(paid), (*written, *(text for text in constants if isinstance(text, str))), sought

    def render_pieces(self, template: Template, variables: Mapping[str, object], budget: RenderBudget) -> Iterator[str]:
        """Yield the text piece by piece, paid from `budget`.

        Raises:
            TooCostly: the budget is spent.
        """
        return template.generate({**variables, _BUDGET: budget})

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use the attribute."""
        return attr not in _NO_TEXT and super().is_safe_attribute(obj, attr, value)

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a filter that a template names in a text, as with `map`."""
        if isinstance(name, str) and " " in name:
            raise TemplateRuntimeError(f"No filter named {name!r}.")
        return super().call_filter(name, *args, **kwargs)

    def call_plain(self, context: Context, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call Jinja's own filter, which pays nothing."""
        return super().call_filter(_PLAIN.format(name), value, args, kwargs, context=context)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run an operator for a template, and pay for it from the budget of the rendering."""
        budget = _budget(context)
        if operator == "+" and isinstance(left, list) and isinstance(right, list):
            return budget.joined_lists(left, right)
        if operator == "+" and isinstance(left, str) and isinstance(right, str) and not _escapes(left, right):
            return budget.joined_texts((left, right))
        budget.binary(operator, left, right)
        return budget.value(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, macro or method for a template, and pay for its work from the budget of the rendering.

        Raises:
            TooCostly: the budget is spent.
        """
        budget = _budget(__context)
        wrapped = getattr(__obj, "__wrapped__", __obj)  # the sandbox's own `format`
        owner, name = getattr(wrapped, "__self__", None), getattr(wrapped, "__name__", "")
        if isinstance(owner, str):
            if name in ("format", "format_map"):
                budget.formatted(owner, (args, kwargs))
            if name == "join" and args:
                args = (list(budget.each(args[0])), *args[1:])  # can be a generator
            budget.method(owner, name, args, kwargs)
        return budget.value(super().call(__context, __obj, *args, **kwargs))


def _searched_texts(parsed: nodes.Template) -> Iterator[str]:
    """Yield texts that are compared with others, or passed to a method, filter or test that searches; variables, too.

    Arguments of `join` and `default`, and the second one of `replace`, are written, and not included.
    """
    given: list[nodes.Node] = []
    for node in parsed.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
        match node:
            case nodes.Compare():
                given += [node.expr, *(operand.expr for operand in node.ops)]
            case nodes.Call(node=nodes.Getattr(attr=name)) | nodes.Filter(name=name):
                given += [] if name in _INSERTING else node.args[: 1 if name == "replace" else None]
            case nodes.Test():
                given += node.args
    names = {each.name for each in given if isinstance(each, nodes.Name)}
    given += [each.node for each in parsed.find_all(nodes.Assign) if getattr(each.target, "name", None) in names]
    for each in given:
        items = each.items if isinstance(each, nodes.List | nodes.Tuple) else [each]
        yield from (item.value for item in items if isinstance(item, nodes.Const) and isinstance(item.value, str))


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's texts for training; its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own is no class variable

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(list(parser.parse_statements(("name:endgeneration",), drop_needle=True)), lineno=line)


class _Paid(NodeTransformer):
    """Passes every expression that costs something through a filter that pays."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Make the loop pay for each item."""
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _EACH)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load", lineno=node.lineno), _JOINED)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        """Make each written value pay for its text."""
        self.generic_visit(node)
        node.nodes = [_filtered(each, _TEXT) for each in node.nodes]  # within a macro they stay in one text
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _PART) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _VALUE)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _VALUE)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _VALUE) if node.ctx == "load" else node

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        """Pay for a macro's arguments, a list that no literal makes, when it is named."""
        return _filtered(node, _VALUE) if node.ctx == "load" and node.name in ("varargs", "kwargs") else node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _joined(context: Context, made: Any) -> str:
    budget = _budget(context)
    return budget.joined_texts([each if isinstance(each, str) else budget.text(each) for each in made])


def _escapes(left: str, right: str) -> bool:
    return hasattr(left, "__html__") or hasattr(right, "__html__")


def _make_refusing_filter(name: str) -> Callable[..., Any]:
    """Return a filter that only raises TooCostly."""

    @pass_context
    def refused(context: Context, value: object, *args: object, **kwargs: object) -> None:
        raise TooCostly(f"it calls the filter {name}, whose time may grow with the square of what it is given")

    return refused


def _paid(name: str) -> Callable[..., Any]:
    """Return Jinja's filter, paid like a method if its value is a text. Its result is paid like every value."""

    @pass_context
    def paid(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        if name in _WRITING and not isinstance(value, str):
            value = budget.text(value)
        if name == "join":
            value = list(budget.each(value))
            budget.spend(budget.weight(value) + len(value) * budget.weight([args, kwargs]))
        elif name == "format":
            budget.binary("%", value, kwargs or args)
        elif name in _COUNTING:
            _require_small((*args, *kwargs.values()))
        elif isinstance(value, str):
            budget.method(value, "characters" if name in _SPLITTING else name, args, kwargs)
        result = _call_plain(context, name, value, *args, **kwargs)
        if result is value:  # `default` often returns its input
            return result
        return map(budget.value, result) if isinstance(result, GeneratorType) else budget.value(result)

    return paid


def _call_plain(context: Context, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
    sandbox: Any = context.environment
    return sandbox.call_plain(context, name, value, args, kwargs)


def _to_json(
    context: Context,
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes of Jinja's own `tojson`, which are for HTML.

    Noncharacters are never escaped: they mark client text, and are searched for later. A `SpelledJson` keeps its
    spelling, whatever the options.
    """
    budget = _budget(context)
    budget.spend(budget.weight(value))
    if indent is None and separators is None:
        text = budget.text(to_json(value, partial(json.dumps, ensure_ascii=ensure_ascii, sort_keys=sort_keys)))
    else:
        _require_small((indent,))
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        text = to_json(value, lambda value: "".join(map(budget.text, encoder.iterencode(value))))
    if not ensure_ascii:
        return text
    return _NONCHARACTER.sub(lambda found: chr(int(found["code"], 16)) if found["code"] else found[0], text)


def _sum(context: Context, items: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    """Run Jinja's `sum`, with every addition paid."""
    sandbox: Any = context.environment
    if isinstance(start, str):
        raise TypeError("sum() can't sum strings")
    total = start
    summands = items if attribute is None else _call_plain(context, "map", items, attribute=attribute)
    for item in _budget(context).each(summands):
        total = sandbox.call_binop(context, "+", total, item)
    return total


def _num_words(context: Context, value: object) -> int:
    """Run Jinja's `wordcount`, without a list of the words."""
    return sum(1 for _ in _budget(context).each(_WORD.finditer(_budget(context).text(value))))


def _require_small(given: tuple[object, ...]) -> None:
    if any(isinstance(each, list | tuple) or (isinstance(each, int) and abs(each) > 1000) for each in given):
        raise TooCostly("it gives a filter a list, or a number above 1000, to count with")


class _Namespace(Namespace):
    """Jinja's `namespace`. It is written out without its contents, because it can change after it was paid."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _budget(context: Context) -> RenderBudget:
    budget: RenderBudget = context.parent[_BUDGET]
    return budget
