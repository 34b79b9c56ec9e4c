//! Templates that would take gigabytes of memory or never end. `tests/bodies.rs` of the crate `api`
//! measures the memory of each.

/// The limit that ends a rendering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostileEnding {
    Bytes,
    Refused(&'static str),
}
use HostileEnding::{Bytes, Refused};

/// Ways to grow without end or beyond any memory, each with the limit that stops it.
pub(super) const HOSTILE: &[(HostileEnding, &str)] = &[
    (
        Bytes,
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    ),
    (
        Bytes,
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    ),
    (
        Bytes,
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x * 9 %}{% endfor %}",
    ),
    (
        Bytes,
        "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|length }}",
    ),
    (
        Bytes,
        "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}{% set ns.x = ns.x * 9 %}{% endfor %}",
    ),
    (
        Refused("nested more than 64 levels"),
        "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    ),
    (
        Refused("nested more than 64 levels"),
        "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x == ns.x }}",
    ),
    (
        Refused("nested more than 64 levels"),
        "{% set ns = namespace(x=[]) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}",
    ),
    (
        Refused("cannot hold itself"),
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    ),
    (
        Refused("cannot hold itself"),
        "{% set a = namespace() %}{% set b = namespace(a=a) %}{% set a.b = b %}{{ a == b }}",
    ),
    (
        Bytes,
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x|replace('', ns.x) %}{% endfor %}",
    ),
    (
        Bytes,
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('', ns.x) %}{% endfor %}",
    ),
    (
        Bytes,
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x, ns.x]|join(ns.x) %}{% endfor %}",
    ),
    (
        Bytes,
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x.join([ns.x, ns.x, ns.x]) %}{% endfor %}",
    ),
    (
        Bytes,
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = '%s%s'|format(ns.x, ns.x) %}{% endfor %}",
    ),
    (
        Bytes,
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    ),
    (
        Bytes,
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    ),
    (
        Bytes,
        "{% set ns = namespace(x='ab') %}{% macro m(a) %}{{ a }}{{ a }}{% endmacro %}{% for i in range(60) %}{% set ns.x = m(ns.x) %}{% endfor %}",
    ),
    (
        Bytes,
        "{% set ns = namespace(x='ab', l=[]) %}{% for i in range(90000) %}{% set ns.l = ns.l + [ns.x * 9999] %}{% endfor %}",
    ),
    (
        Refused("with such a width"),
        "{{ '%999999999d'|format(1) }}",
    ),
    (
        Refused("with such a width"),
        "{{ '{:>999999999}'.format('a') }}",
    ),
    (
        Bytes,
        "{{ 'a'|indent(999999999) }}{{ 'a\nb'|indent(999999999) }}",
    ),
    (Bytes, "{{ messages|tojson(indent=999999999) }}"),
    (Bytes, "{{ [1]|batch(99999999, 'x')|list|length }}"),
    (Bytes, "{{ [1]|slice(99999999, 'x')|list|length }}"),
    (
        Bytes,
        "{% for a in range(100000) %}{% for b in range(100000) %}0123456789abcdef0123456789abcdef{% endfor %}{% endfor %}",
    ),
    (
        Bytes,
        "{% set x = messages[0].content * 999999 %}{% for a in range(100000) %}{% if 'zz' in x %}{% endif %}{% set y = x[1:] %}{% endfor %}",
    ),
    (
        Bytes,
        "{% for a in range(100000) %}{% set x = range(100000)|list %}{% endfor %}",
    ),
    (
        Bytes,
        "{% for a in range(100000) %}{% set x = 'a b c d'|string|upper|list %}{% for b in range(1000) %}{% endfor %}{% endfor %}",
    ),
    (
        Refused("recursion limit"),
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ),
    (
        Bytes,
        "{% set x = 'ab' * 500 %}{% set x = x * 100 %}{{ range(20000)|join(d=x)|length }}",
    ),
    (
        Bytes,
        "{% set x = 'ab' * 500 %}{% set x = x * 100 %}{{ range(20000)|join(d=[x])|length }}",
    ),
    (
        Bytes,
        "{% set x = 'ab' * 500 %}{% set x = x * 100 %}{{ ([x] * 20000)|map('upper')|list|length }}",
    ),
    (
        Bytes,
        "{% for i in [messages[0].content * 999999, 2] %}{{ ([loop] * 2000)|join(',', 'previtem')|length }}{% endfor %}",
    ),
    (
        Bytes,
        "{% for i in [messages[0].content * 999999, 2] %}{{ ([loop] * 2000)|join(d=',', attribute='previtem')|length }}{% endfor %}",
    ),
    (Bytes, "{{ 1|indent(width=999999999)|length }}"),
    (
        Bytes,
        "{{ 'a'|indent(999999999.0, first=true, blank=true)|length }}",
    ),
    (
        Bytes,
        "{% set x = 'ab' * 500 %}{% set x = x * 100 %}{{ [x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x]|upper|upper|upper|length }}{{ ([x] * 1000)|title|length }}",
    ),
    (
        Bytes,
        "{% set x = 'ab' * 500 %}{% set x = x * 100 %}{{ ([x] * 20000)|sort|length }}",
    ),
    (
        Bytes,
        "{% set x = 'ab' * 500 %}{% set x = x * 100 %}{{ ([{'a': x}] * 20000)|sort(attribute='a')|length }}",
    ),
    (
        Bytes,
        "{% set x = 'ab' * 500 %}{% set x = x * 100 %}{{ ([{'a': x}] * 20000)|groupby(attribute='a')|length }}",
    ),
    (
        Bytes,
        "{% set x = 'ab' * 500 %}{% set x = x * 100 %}{{ ([{'a': x}] * 20000)|unique(attribute='a')|length }}",
    ),
    (
        Bytes,
        "{% set x = 'ab' * 500 %}{% set x = x * 100 %}{{ ([{'a': x}] * 20000)|max(attribute='a')|length }}",
    ),
    (
        Bytes,
        "{% set x = 'ab' * 500 %}{% set x = x * 100 %}{% set y = x[1:] ~ 'b' %}{{ y in [x] * 20000 }}",
    ),
    (
        Bytes,
        "{% set x = 'a' * 2000 %}{% set x = x * 100 %}{{ x|list|length }}",
    ),
    (
        Bytes,
        "{% set x = 'a' * 1000 %}{{ (x * 70)|batch(1)|length }}",
    ),
    (
        Bytes,
        "{% set x = [0] * 1000 %}{{ (x * 70)|batch(1)|length }}",
    ),
    (
        Bytes,
        "{{ 'ab'|slice(90000)|length }}{{ 'ab'|slice(90000)|length }}",
    ),
    (
        Bytes,
        "{% set x = [messages[0]] * 1000 %}{{ (x * 50)|groupby('role')|length }}",
    ),
    (
        Bytes,
        "{% set x = '\u{1}' * 1000 %}{{ (x * 1300)|tojson|length }}",
    ),
    (
        Bytes,
        "{% set m = dict(a=1) %}{% for i in range(100000) %}{% set x = dict(m, b=2) %}{% endfor %}",
    ),
    (
        Bytes,
        "{% for i in range(100000) %}{% set x = namespace(a=1, b=2, c=3, d=4) %}{% endfor %}",
    ),
    (
        Bytes,
        "{% macro f() %}{{ kwargs }}{% endmacro %}{% set m = dict(a=1, b=2, c=3, d=4) %}{% for i in range(100000) %}{% set x = dict(**m) %}{% endfor %}",
    ),
    (
        Refused("does not exist"),
        "{{ messages|map('\u{1}upper')|list }}",
    ),
    (
        Refused("does not exist"),
        "{{ messages|select('\u{1}in', messages)|list }}",
    ),
];
