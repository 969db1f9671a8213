"""Calls of tools in a model's text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swarm.gateway.chat_template import Message
from swarm.gateway.tools import (
    HERMES,
    LLAMA3,
    MISTRAL,
    CallReader,
    Tool,
    ToolCall,
    ToolChoice,
    ToolFormat,
    format_of,
    knows_tools,
    plain_messages,
    required_call,
)

ADD = Tool(name="add", description="Adds.", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})
NOW = Tool(name="now", description="", parameters={"type": "object"})
CHOICE = ToolChoice(tools=(ADD, NOW))
CALL = ToolCall(name="add", arguments='{"a": 1}')


def read(text: str, form: ToolFormat, choice: ToolChoice = CHOICE, *, step: int = 1) -> tuple[str, list[ToolCall]]:
    """Return what a text holds that comes `step` characters at a time."""
    reader = CallReader(choice, form)
    texts, calls = [], []
    for at in range(0, len(text), step):
        more, found = reader.feed(text[at : at + step])
        texts.append(more)
        calls += found
    rest, found = reader.finish()
    return "".join(texts) + rest, calls + found


HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (HERMES, HERMES_CALL, ("", [CALL])),
        (HERMES, f"\n\n{HERMES_CALL}", ("", [CALL])),
        (HERMES, f"Let me see. {HERMES_CALL}\n{HERMES_CALL}", ("Let me see.", [CALL, CALL])),
        (HERMES, HERMES_CALL.removesuffix("</tool_call>"), ("", [CALL])),
        (HERMES, "no < call <tool", ("no < call <tool", [])),
        (HERMES, "<tool_call>{bad</tool_call> on", ("<tool_call>{bad</tool_call> on", [])),
        (HERMES, '<tool_call>{"name": "rm"}</tool_call>', ('<tool_call>{"name": "rm"}</tool_call>', [])),
        (HERMES, "<tool_call>[1]", ("<tool_call>[1]", [])),
        (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', ("", [CALL])),
        (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "no"}]', None),
        (LLAMA3, '{"name": "add", "parameters": {"a": 1}}', ("", [CALL])),
        (LLAMA3, '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', ("", [CALL])),
        (LLAMA3, "plain {text}", ("plain {text}", [])),
        (LLAMA3, '{"name": "other"}', ('{"name": "other"}', [])),
    ],
)
def test_calls_are_found_however_the_text_comes(
    form: ToolFormat, text: str, expected: tuple[str, list[ToolCall]] | None, step: int
) -> None:
    assert read(text, form, step=step) == (expected or (text, []))


def test_arguments_that_are_text_stay_as_they_are() -> None:
    text = '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert read(text, HERMES)[1] == [ToolCall(name="now", arguments='{"a": 1}')]


def test_without_parallel_calls_the_first_counts() -> None:
    choice = ToolChoice(tools=(ADD,), has_several=False)
    assert len(read(HERMES_CALL * 2, HERMES, choice)[1]) == 1


def test_a_required_call_begins_with_the_mark_and_is_held_to_the_schemas() -> None:
    begin, grammar = required_call(ToolChoice(tools=(ADD, NOW), is_required=True), HERMES)
    assert begin == "<tool_call>\n"
    schema = json.loads(grammar.text)
    assert [each["properties"]["name"]["const"] for each in schema["anyOf"]] == ["add", "now"]
    assert schema["anyOf"][0]["properties"]["arguments"] == ADD.parameters
    begin, grammar = required_call(ToolChoice(tools=(ADD,), is_required=True, has_several=False), MISTRAL)
    schema = json.loads(grammar.text)
    assert (begin, schema["minItems"], schema["maxItems"]) == ("[TOOL_CALLS]", 1, 1)
    # The answer that follows has no mark, since the prompt had it.
    choice = ToolChoice(tools=(ADD,), is_required=True)
    assert read('{"name": "add", "arguments": {"a": 1}}', HERMES, choice) == ("", [CALL])


@pytest.mark.parametrize(
    ("template", "form", "knows"),
    [
        (None, HERMES, False),
        ("{{ messages }}", HERMES, False),
        ("{{ messages }}[TOOL_CALLS]", HERMES, False),
        ("{% if tools %}<tool_call>{% endif %}", HERMES, True),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", MISTRAL, True),
        ("{% if tools %}<|python_tag|>{% endif %}", LLAMA3, True),
        ("{% if tools is defined %}something else{% endif %}", HERMES, True),
    ],
)
def test_the_form_is_what_the_template_shows(template: str | None, form: ToolFormat, knows: bool) -> None:
    assert format_of(template) is form
    assert knows_tools(template) is knows


def test_a_template_without_tools_gets_them_as_text() -> None:
    call: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = (
        Message(role="system", content="Be brief."),
        Message(role="user", content="1+1?"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="2", tool_call_id="1"),
    )
    system, user, assistant, answer = plain_messages(turns, CHOICE.tools)
    assert system.role == "system"
    assert system.content.startswith("Be brief.\n\n")
    assert json.dumps(ADD.as_json()) in system.content
    assert user == turns[1]
    assert read(assistant.content, HERMES) == ("", [CALL])
    assert (answer.role, answer.content) == ("user", "<tool_response>\n2\n</tool_response>")
    assert plain_messages(turns[1:2], CHOICE.tools)[0].role == "system"
    assert plain_messages(turns[1:2], ()) == turns[1:2]
