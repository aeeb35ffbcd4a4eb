"""The environment of chat templates gives what jinja2's own sandbox gives, field by field."""

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from proxy.prompt.environment import FieldsFirst

VALUES = {
    "message": {"role": "user", "items": "not the method", "none": None, "f": "{0}".format, 1: "one"},
    "messages": [{"role": "user"}, {"role": "tool"}],
}


@pytest.mark.parametrize(
    "source",
    [
        "{{ message.role }}",
        "{{ message['role'] }}{{ message.get('role') }}",
        "{{ message.missing }}|{{ message.missing is defined }}|{{ message.none is none }}",
        "{{ message.missing.deeper }}",
        "{{ message.items is string }}{{ message.items() | length }}{{ message['items'] }}",
        "{{ message.f('x') }}",
        "{{ message.__class__ }}",
        "{{ message.__class__.__mro__ }}",
        "{{ message.update({'a': 1}) }}",
        "{{ 'a-b'.split('-') }}{{ 'a'.join(['x', 'y']) }}{{ 'a'.title }}{{ 'x'.nothing }}",
        "{% for m in messages %}{{ m.role.strip('r') }}{% endfor %}{{ 'a'.strip(1) }}",
        "{{ '{0.__class__}'.format('x') }}{{ '{a}'.format_map({'a': 1}) }}",
        "{{ 'x'.__class__ }}{{ 'x'.encode.__self__ }}",
        "{{ 'a{}'.format(1) }}{{ ' a '.strip() }}",
        "{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.nextitem.role }}{% endfor %}",
        "{% for m in messages %}{{ loop.nothing is defined }}{{ loop._iterator }}{% endfor %}",
        "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
        "{% set n = namespace(at=1) %}{% set n.at = 2 %}{{ n.at }}{{ n.nothing }}{{ n.__class__ }}",
        "{% set n = namespace(f='{0.__class__}'.format) %}{{ n.f('x') }}",
        "{% set n = namespace() %}{{ n.nothing.deeper }}",
        "{% macro f(a, b='c') %}{{ a }}{{ b }}{% endmacro %}{% for m in messages %}{{ f(m.role, b=1) }}{% endfor %}",
        "{% macro f() %}{{ caller(2) }}{% endmacro %}{% call(x) f() %}{{ x }}{{ message.role }}{% endcall %}",
        "{% macro f(a) %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1, 2, z=3) }}{{ f.__call__ }}",
        "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}",
        "{% for m in messages %}{{ m.role.upper() }}{{ m.role.center(9, fillchar='x') }}{% endfor %}",
    ],
)
def test_a_template_reads_what_the_sandbox_lets_it_read(source: str) -> None:
    assert outcome(FieldsFirst(), source) == outcome(ImmutableSandboxedEnvironment(), source)


def outcome(environment: ImmutableSandboxedEnvironment, source: str) -> str:
    """What is rendered, or the error."""
    try:
        return environment.from_string(source).render(**VALUES)
    except (TemplateError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
