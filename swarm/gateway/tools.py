"""Calls of tools: how a model's chat template spells them, and how they are read from an answer. Pure.

A model writes a call as text, in the form it was trained on; its chat template shows which (`FORMATS`). Templates that know
nothing of tools get the tools described in a system message, in the most common form.

With `tool_choice` "auto" the model writes freely, and what looks like a call of a known tool becomes one; anything else stays
text. "required", or a tool's name, begins the answer with the call's mark and holds the rest to the tools' JSON schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swarm.backbone.requests import Grammar, GrammarKind
from swarm.backbone.text_stream import overlap
from swarm.gateway.chat_template import Message
from swarm.gateway.errors import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a model may ask its caller to call.

    Attributes:
        parameters: JSON schema of its arguments, an object.
    """

    name: str
    description: str
    parameters: Json

    def as_json(self) -> Json:
        """Return it as OpenAI writes it, which is what templates read."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A model's request to call a function; `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """What tools an answer may call.

    Attributes:
        is_required: the answer is a call and nothing else.
        has_several: it may hold more than one.
    """

    tools: tuple[Tool, ...] = ()
    is_required: bool = False
    has_several: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a call is written.

    Attributes:
        mark: what a template that uses this form contains.
        begin, end: around the JSON of a call; an empty `end` is the answer's end, an empty `begin` its first character.
        arguments: the key of a call's arguments, beside `name`.
        is_list: the JSON is a list of calls.
    """

    name: str
    mark: str
    begin: str
    end: str
    arguments: str = "arguments"
    is_list: bool = False


HERMES = ToolFormat(name="hermes", mark="<tool_call>", begin="<tool_call>", end="</tool_call>")
MISTRAL = ToolFormat(name="mistral", mark="[TOOL_CALLS]", begin="[TOOL_CALLS]", end="", is_list=True)
LLAMA3 = ToolFormat(name="llama3", mark="<|python_tag|>", begin="", end="", arguments="parameters")
# First match counts. Hermes: Qwen, Granite, GLM and most others. The source is each family's published template.
FORMATS = (MISTRAL, LLAMA3, HERMES)

INSTRUCTIONS = """You may call functions. They are described by JSON within <tools></tools>:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON within <tool_call></tool_call>:
<tool_call>
{{"name": NAME, "arguments": {{...}}}}
</tool_call>"""


def knows_tools(template: str | None) -> bool:
    """Return whether a chat template reads the variable `tools`."""
    return template is not None and re.search(r"\btools\b", template) is not None


def format_of(template: str | None) -> ToolFormat:
    """Return the form of calls of a model with this chat template."""
    if template is None or not knows_tools(template):
        return HERMES
    return next((each for each in FORMATS if each.mark in template), HERMES)


def instructions(tools: Sequence[Tool]) -> str:
    """Return the text that tells a model of tools where its template does not."""
    return INSTRUCTIONS.format(tools="\n".join(json.dumps(tool.as_json(), ensure_ascii=False) for tool in tools))


def written(call: Json) -> str:
    """Return a call of an earlier turn (OpenAI's `function` object) as `instructions` asks for it."""
    return f"{HERMES.begin}\n{json.dumps(call, ensure_ascii=False)}\n{HERMES.end}"


def required_call(choice: ToolChoice, form: ToolFormat) -> tuple[str, Grammar]:
    """Return how an answer that must be a call begins, and what the rest is held to."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, form.arguments: tool.parameters},
            "required": ["name", form.arguments],
            "additionalProperties": False,
        }
        for tool in choice.tools
    ]
    schema: Json = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if form.is_list:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": None if choice.has_several else 1}
        schema = {key: value for key, value in schema.items() if value is not None}
    text = json.dumps(schema, ensure_ascii=False)
    begin = f"{form.begin}\n" if form is HERMES else form.begin
    return begin, Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)


class CallReader:
    """Finds the calls in an answer's text as it comes."""

    def __init__(self, choice: ToolChoice, form: ToolFormat) -> None:
        self._names = {tool.name for tool in choice.tools}
        self._n_left = None if choice.has_several else 1
        self._form = form
        self._held = ""
        self._is_inside = choice.is_required  # the prompt ends with the mark
        self._is_at_start = True

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the text that is certainly no call, and the calls that are complete."""
        self._held += text
        out: list[str] = []
        calls: list[ToolCall] = []
        while self._step(out, calls):
            pass
        return "".join(out), calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return what is left at the answer's end."""
        held, self._held = self._held, ""
        if not self._is_inside:
            return held, []
        calls = self._read(held.removesuffix(self._form.end) if self._form.end else held)
        return ("", calls) if calls else (self._form.begin + held, [])

    def _step(self, out: list[str], calls: list[ToolCall]) -> bool:
        """Go one mark further; False once more text is needed."""
        form = self._form
        if self._is_inside:
            if not form.end or form.end not in self._held:
                return False
            inner, _, self._held = self._held.partition(form.end)
            found = self._read(inner)
            calls += found
            if not found:
                out.append(form.begin + inner + form.end)
            self._is_inside, self._is_at_start = False, False
            return True
        if not form.begin:
            return self._step_at_start(out)
        before, mark, after = self._held.partition(form.begin)
        if mark:
            out.append(before.rstrip())  # the blank lines before a call are its own
            self._held, self._is_inside = after, True
            return True
        certain = self._held[: len(self._held) - overlap(self._held, form.begin)].rstrip()
        out.append(certain)
        self._held = self._held[len(certain) :]
        return False

    def _step_at_start(self, out: list[str]) -> bool:
        """Without a mark, a call is an answer that begins as JSON does."""
        if self._is_at_start:
            start = self._held.lstrip().removeprefix(self._form.mark)
            if not start or self._form.mark.startswith(start):
                return False
            self._is_at_start = False
            if start.startswith("{"):
                self._held, self._is_inside = start, True
                return True
        out.append(self._held)
        self._held = ""
        return False

    def _read(self, text: str) -> list[ToolCall]:
        """Return the calls that a text holds, or none where it is anything else."""
        try:
            value: Any = json.loads(text)
        except (ValueError, RecursionError):
            return []
        calls: list[ToolCall] = []
        for each in value if self._form.is_list and isinstance(value, list) else [value]:
            name = each.get("name") if isinstance(each, dict) else None
            if not isinstance(name, str) or name not in self._names:
                return []
            arguments = each.get(self._form.arguments, each.get("arguments", {}))
            calls.append(
                ToolCall(
                    name=name,
                    arguments=arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
                )
            )
        if self._n_left is not None:
            calls = calls[: self._n_left]
            self._n_left -= len(calls)
        return calls


def plain_messages(messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Message, ...]:
    """Return a conversation for a template that knows no tools: their descriptions, calls and answers as text."""
    plain: list[Message] = []
    for message in messages:
        content = message.content
        if message.tool_calls:
            content = "\n".join([*filter(None, [content]), *(written(call["function"]) for call in message.tool_calls)])
        if message.role == "tool":
            plain.append(Message(role="user", content=f"<tool_response>\n{content}\n</tool_response>"))
        else:
            plain.append(Message(role=message.role, content=content))
    if tools and plain and plain[0].role == "system":
        plain[0] = Message(role="system", content=f"{plain[0].content}\n\n{instructions(tools)}")
    elif tools:
        plain.insert(0, Message(role="system", content=instructions(tools)))
    return tuple(plain)
