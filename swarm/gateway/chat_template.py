"""Messages -> prompt text, by the Jinja2 chat template that a GGUF file carries.

The template comes from a file that somebody else made, so it runs in Jinja2's immutable sandbox, and on a meter: its
source, every string that it builds and its output are bounded, and each loop turn and each call looks at a deadline.
What stays unbounded is one single operation (say, printing a list nested in itself many times over).

What it offers to templates is what `transformers` offers: `messages`, `add_generation_prompt` (true unless a request says
otherwise), `bos_token`, `eos_token`, `raise_exception`, `strftime_now`, `tojson` without HTML escapes, `{% break %}` and
`{% continue %}`, `{% generation %}`, and `tools` where a request has some. Not offered, because their output grows with a
number rather than with their input: `str.format`, `%` on strings, and filters such as `center` and `batch`.

A file with no template gets ChatML, as llama.cpp does: most instruction-tuned models without one were trained on it.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import FILTERS, do_indent
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from swarm.errors import UserError

MAX_TEMPLATE_CHARS = 256 * 1024  # guessed: the longest published templates have some 20 Ki
MAX_TEXT_CHARS = 8 * 1024 * 1024  # of the prompt, and of any string on the way: as much as a request body may hold
MAX_RENDER_S = 2.0  # guessed: a conversation of 1,000 messages takes a few milliseconds
MAX_INT_BITS = 256  # of any product: templates count messages
MAX_INDENT = 64  # columns

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_STR_METHODS = frozenset(  # those whose result is bounded by their input, or by `call` below
    """
    capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric
    isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition
    rsplit rstrip split splitlines startswith strip swapcase title upper
    """.split()  # noqa: SIM905 (a column of quotes reads worse)
)
_FILTERS = frozenset(  # Jinja2's own, likewise; four more are ours
    """
    abs capitalize count d default dictsort e escape first float groupby int items last length list lower map max
    min reject rejectattr reverse round safe select selectattr sort string sum title trim unique upper wordcount
    """.split()  # noqa: SIM905 (a column of quotes reads worse)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation.

    Attributes:
        tool_calls: OpenAI's objects, but with `arguments` as the object that its JSON text stands for, as templates expect.
        tool_call_id, name: of a tool's answer.
    """

    role: str
    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return what templates read; what is absent is not there."""
        more = {"tool_calls": list(self.tool_calls), "tool_call_id": self.tool_call_id, "name": self.name}
        return {"role": self.role, "content": self.content, **{key: value for key, value in more.items() if value}}


class ChatTemplate:
    """One compiled template. Safe to use from several threads.

    Args:
        source: Jinja2 text; None stands for ChatML.
        special_tokens: `bos_token` and `eos_token` as text.
        clock: seconds, for the deadline.
        now: what `strftime_now` formats.

    Raises:
        UserError: the template is too long or does not compile.
    """

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        source = CHATML if source is None else source
        if len(source) > MAX_TEMPLATE_CHARS:
            raise UserError(
                f"the model's chat template is too long: got {len(source)} characters, expected at most"
                f" {MAX_TEMPLATE_CHARS}"
            )
        self._special_tokens = dict(special_tokens)
        self._clock = clock
        environment = _MeteredEnvironment(now)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(_Meter().visit(tree))
        except (
            Exception
        ) as error:  # the compiler recurses over the source and computes its constants: anything may rise
            raise UserError(f"the model's chat template does not compile: {_message_of(error)}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt for these messages, ending where the assistant's answer begins.

        Args:
            tools: OpenAI's objects.
            variables: more of what the template may read, such as `enable_thinking`.

        Raises:
            UserError: the template refused the messages (with its own words), failed, or went past a limit.
        """
        given = {**(variables or {}), **self._special_tokens, "messages": [message.as_json() for message in messages]}
        if tools:
            given["tools"] = list(tools)
        deadline = self._clock() + MAX_RENDER_S

        def check_time() -> None:
            if self._clock() > deadline:
                raise SecurityError(f"took longer than {MAX_RENDER_S:g} s")

        token = _check_time.set(check_time)
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate({"add_generation_prompt": True} | given):
                check_time()
                size += len(piece)
                _check_size(size)
                pieces.append(piece)
            prompt = "".join(pieces)
            prompt.encode()  # a template's escapes can spell half of a surrogate pair
        except Exception as error:  # template code can fail in any way that Python can
            raise UserError(f"the model's chat template refused the messages: {_message_of(error)}") from error
        finally:
            _check_time.reset(token)
        return prompt


_check_time: ContextVar[Callable[[], None]] = ContextVar("_check_time")  # set while a template renders


def _message_of(error: Exception) -> str:
    """Return the template's own words where it raised them, else the error's type too; at most 500 characters."""
    text = str(error)
    return (text if isinstance(error, TemplateError) and text else f"{type(error).__name__}: {text}")[:500]


def _check_size(n_chars: int) -> None:
    if n_chars > MAX_TEXT_CHARS:
        raise SecurityError(f"builds a text of more than {MAX_TEXT_CHARS} characters")


class _Meter(NodeTransformer):
    """Makes loops look at the deadline, and `~` at the size of what it builds."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call(node, "step"), lineno=node.lineno))
        if node.test is not None:  # a filtered loop runs its test, not its body, for the items that it drops
            node.test = nodes.And(_call(node, "step"), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call(node, "tilde", node.nodes)


def _call(node: nodes.Node, method: str, args: list[nodes.Expr] | None = None) -> nodes.Call:
    """Return a call of the environment's `method`, which no variable of a template can shadow."""
    name = nodes.EnvironmentAttribute(method, lineno=node.lineno)
    return nodes.Call(name, args or [], [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """`{% generation %}` marks an assistant's turn for training; here its body alone counts."""

    tags = {"generation"}  # noqa: RUF012 (the name and type are Jinja2's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MeteredEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        self.filters = {name: FILTERS[name] for name in _FILTERS}
        self.filters.update(tojson=_to_json, replace=_replace, join=_join_attribute, indent=_indent)
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise_exception, strftime_now=lambda form: now().strftime(form))

    def step(self) -> bool:
        """Return True; being called is the point (see `call`)."""
        return True

    def tilde(self, *parts: object) -> str:
        """Return what `~` gives for these operands."""
        return _join("", parts)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Return the text of a macro or of a `{% set %}` block; Jinja2 calls it."""
        return _join("", parts)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_time.get()()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str) and function.__name__ in _GROWING_METHODS:
            function = functools.partial(_GROWING_METHODS[function.__name__], owner)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "+" if hasattr(left, "__len__") and hasattr(right, "__len__"):
                _check_size(len(left) + len(right))
            case "*":
                for sequence, times in ((left, right), (right, left)):
                    if hasattr(sequence, "__len__") and isinstance(times, int):
                        _check_size(len(sequence) * max(times, 0))
                if isinstance(left, int) and isinstance(right, int):
                    _check_bits(left.bit_length() + right.bit_length())
            case "**" if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() * abs(right))
            case "%" if isinstance(left, str):
                raise SecurityError("uses % on a string, which is not offered: use ~")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr not in _STR_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is not None:
            raise SecurityError("uses str.format, which is not offered: use ~")
        return None


def _check_bits(n_bits: int) -> None:
    if n_bits > MAX_INT_BITS:
        raise SecurityError(f"computes a number of more than {MAX_INT_BITS} bits")


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as `transformers` writes it: plain, where Jinja2's own filter escapes for HTML."""
    if indent is not None:
        _check_indent(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _replace(text: object, old: str, new: str, count: int | None = None) -> str:
    text = str(text)
    _check_size(len(text) + text.count(old) * max(0, len(new) - len(old)))
    return text.replace(old, new, -1 if count is None else count)


def _join(separator: str, parts: Iterable[object]) -> str:
    texts: list[str] = []
    size = 0
    for part in parts:
        texts.append(str(part))
        size += len(texts[-1]) + len(separator)
        _check_size(size)
    return separator.join(texts)


def _join_attribute(parts: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    """Return the filter `join`; `attribute` names a key of each part."""
    return _join(d, parts if attribute is None else (part[attribute] for part in parts))


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    n_columns = _check_indent(len(width) if isinstance(width, str) else width)
    _check_size(len(text) + (text.count("\n") + 1) * n_columns)
    return do_indent(text, width, first, blank)


def _check_indent(n_columns: int) -> int:
    if n_columns > MAX_INDENT:
        raise SecurityError(f"indents too far: got {n_columns} columns, expected at most {MAX_INDENT}")
    return n_columns


_GROWING_METHODS: Mapping[str, Callable[..., str]] = {"replace": _replace, "join": _join}
