from __future__ import annotations

import itertools
from datetime import datetime

import pytest

from swarm.errors import UserError
from swarm.gateway.chat_template import MAX_TEMPLATE_CHARS, MAX_TEXT_CHARS, ChatTemplate, Message

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATION = [Message(role="system", content="Be brief."), Message(role="user", content="Grüße <b> 日本")]


def render(source: str | None, messages: list[Message] = CONVERSATION) -> str:
    return ChatTemplate(source, TOKENS).render(messages)


def test_a_file_with_no_template_gets_chatml() -> None:
    assert render(None) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGrüße <b> 日本<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_embedded_models_template_concatenates_the_contents() -> None:
    source = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert render(source) == "Be brief.Grüße <b> 日本"


def test_templates_see_what_transformers_gives_them() -> None:
    source = """{{ bos_token }}{% for m in messages %}
    {% if m['role'] == 'system' %}
        {% continue %}
    {% endif %}
[{{ m.role | upper ~ ':' ~ m['content'].replace('ü', 'ue') | trim }}]{{ loop.last }}
{% endfor %}
{% if tools is defined %}TOOLS{% endif %}
{% if add_generation_prompt %}
{{ {'b': '<ü>', 'a': 1} | tojson }}{{ [1] | tojson(indent=1) }}{{ eos_token }}
{% endif %}"""
    assert render(source) == '<s>[USER:Grueße <b> 日本]True\n{"b": "<ü>", "a": 1}[\n 1\n]</s>\n'


def test_the_date_comes_from_the_clock_that_was_given() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2024, 7, 26))
    assert template.render([]) == "26 Jul 2024"


def test_generation_blocks_and_macros_and_namespaces_work() -> None:
    source = (
        "{% macro turn(m) %}<{{ m.content }}>{% endmacro %}{% set ns = namespace(n=0) %}"
        "{% for m in messages if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{{ turn(m) }}{% endfor %}"
        "{% generation %}{{ ns.n }}{% endgeneration %}{% set x %}a{{ 'b' }}{% endset %}{{ x }}"
        "{{ ['p', 'q'] | join('-') }}{{ '/'.join(['r', 's']) }}{{ 'l\nm' | indent(2) }}"
    )
    assert render(source) == "<Grüße <b> 日本>1abp-qr/sl\n  m"


def test_a_refusal_carries_the_templates_own_words() -> None:
    with pytest.raises(UserError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{% for %}", "does not compile"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "does not compile"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "too long"),
        ("{{ 1 | center }}", "No filter named 'center'"),
    ],
)
def test_a_template_that_does_not_compile_is_named_so(source: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        ChatTemplate(source, TOKENS)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ messages | map(attribute='__class__.__mro__') | list }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ lipsum(n=10) }}", "undefined"),
        ("{% include '/etc/passwd' %}", "loader"),
        ("{{ 'a' * 10**9 }}", "more than"),
        ("{{ [0] * 10**9 }}", "more than"),
        ("{{ (10**9 * [0]) | length }}", "more than"),
        ("{{ 7 ** 7 ** 7 ** 7 }}", "bits"),
        ("{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}", "bits"),
        ("{{ '%1000000000d' % 1 }}", "% on a string"),
        ("{{ '{:1000000000}'.format(1) }}", "str.format"),
        ("{{ 'a'.center(10**9) }}", "unsafe"),
        ("{{ 'a'['ljust'](10**9) }}", "unsafe"),
        ("{{ [1] | tojson(indent=10**9) }}", "indents too far"),
        ("{{ 'a' | indent(10**9) }}", "indents too far"),
        (
            "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "more than",
        ),
        (
            "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "more than",
        ),
        (
            "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
            "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
            "more than",
        ),
        ("{% set a = 'a' * 9999 %}{{ a.replace('a', a) }}", "more than"),
        ("{% set a = 'a' * 9999 %}{{ a | replace('a', a) }}", "more than"),
        ("{% set a = 'a' * 9999 %}{{ a.join(a) }}", "more than"),
        ("{% set a = 'a' * 9999 %}{{ a | join(a) }}", "more than"),
        ("{% set a = 'a' * 99999 %}{% for i in range(999) %}{{ a }}{% endfor %}", "more than"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_template_cannot_leave_its_sandbox_nor_outgrow_it(source: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) if false %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
        "{% for a in range(99) recursive %}{{ loop(range(99)) if loop.depth < 20 else '' }}{% endfor %}",
    ],
)
def test_a_template_that_takes_too_long_is_stopped(source: str) -> None:
    ticks = itertools.count()
    template = ChatTemplate(source, TOKENS, clock=lambda: next(ticks) / 1000)
    with pytest.raises(UserError, match="longer than"):
        template.render(CONVERSATION)


def test_a_long_conversation_is_rendered_whole() -> None:
    messages = [Message(role="user", content="x" * 1000)] * 2000
    assert len(render(None, messages)) == 2000 * (1000 + len("<|im_start|>user\n<|im_end|>\n")) + 22
    with pytest.raises(UserError, match="more than"):
        render(None, [Message(role="user", content="x" * MAX_TEXT_CHARS)])
