//! Templates as the library renders them, and templates that grow without end.

use super::*;
use minijinja::value::Serde;
use serde_json::json;

fn templates(source: &str) -> ChatTemplates {
    let special = json!({"bos_token": "<s>"}).as_object().cloned().unwrap();
    ChatTemplates::new(vec![("default".into(), source.into())], special).unwrap()
}

fn conversation(end: End) -> Conversation {
    let messages = json!([
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": " Sure, Hi "},
    ]);
    Conversation {
        messages: Value::from(Serde(messages)),
        body_bytes: 100,
        tools: None,
        documents: None,
        variables: None,
        last_content: Some(" Sure, Hi ".to_owned()),
        end,
    }
}

#[test]
fn generation_marks_stopped_the_template() {
    let source = "{% for m in messages %}\n{%- generation -%} [{{ m.content }}] {% endgeneration %}\n{% endfor %}";
    assert_eq!(
        templates(source)
            .render(&conversation(End::Closed))
            .unwrap(),
        "[Hi] [ Sure, Hi ] "
    );
}

#[test]
fn a_template_that_never_ends_hung_the_server() {
    let source = "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}";
    let error = templates(source)
        .render(&conversation(End::Closed))
        .unwrap_err();
    assert!(
        matches!(error, RenderError::OutOfFuel | RenderError::OutOfBytes(_)),
        "{error}"
    );
}

#[test]
fn the_last_message_was_closed_though_it_goes_on() {
    let plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}";
    let kept = templates(plain)
        .render(&conversation(End::LastMessage))
        .unwrap();
    assert_eq!(kept, "<user>Hi</><assistant> Sure, Hi ");
    let strip = "{% for m in messages %}<{{ m.role }}>{{ m.content.strip() }}</>{% endfor %}";
    let stripped = templates(strip)
        .render(&conversation(End::LastMessage))
        .unwrap();
    assert_eq!(stripped, "<user>Hi</><assistant>Sure, Hi");
    let drops = "{{ bos_token }}";
    assert!(
        templates(drops)
            .render(&conversation(End::LastMessage))
            .is_err()
    );
}

/// Why a rendering ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Bytes,
    Refused(&'static str),
}
use Ended::{Bytes, Refused};

/// Ways to grow, each without end or to far more than any memory, and the limit that stops it.
const HOSTILE: &[(Ended, &str)] = &[
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

#[test]
fn a_template_that_grows_without_end_is_stopped() {
    let mut wrong = Vec::new();
    for (ended, source) in HOSTILE {
        let rendered = templates(source).render(&conversation(End::Closed));
        let is_right = match (&rendered, ended) {
            (Err(RenderError::OutOfBytes(_)), Bytes) => true,
            (Err(RenderError::Refused(reason)), Refused(part)) => reason.contains(part),
            _ => false,
        };
        if !is_right {
            let rendered = rendered.map(|text| text.len());
            wrong.push(format!("{rendered:?} instead of {ended:?}: {source}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_source_that_grows_while_it_compiles_is_refused() {
    for source in [
        "{{ 'a' * 99999999 }}",
        "{{ 'a' * 1000 * 1000 * 100 }}",
        "{{ 'a' * (9999 * 9999) }}",
        "{{ 'a' * 10 ** 8 }}",
        "{{ 'a' * 1e8 }}",
        "{{ 'a' * (1 / 0.00000001) }}",
        "{{ (1,) * 1000 * 1000 * 100 }}",
        "{{ (true,) * 1000 * 1000 * 100 }}",
        "{{ ([1] * 1000 ~ '') * 1000 }}",
        "{{ 1000 * (1000 * (100 * 'a')) }}",
        &"{{ 'a' * 100000 }}".repeat(20),
        "{{ 99999999 * 'a' }}",
        "{{ [1] * 99999999 }}",
        "{{ [*messages, *messages] }}",
        "{% if 1 < messages|length < 3 %}{% endif %}",
        "{% include 'default' %}",
        &"x".repeat(SOURCE_BYTES_MAX + 1),
    ] {
        let special = Map::new();
        let made = ChatTemplates::new(vec![("default".into(), source.to_owned())], special);
        assert!(made.is_err(), "{}", &source[..source.len().min(80)]);
    }
}

#[test]
fn constants_that_templates_use_are_taken() {
    for source in [
        "{{ '=' * 80 ~ '\n' ~ '-' * 80 }}",
        "{% if messages|length > 1000000 %}{{ 2 * 3 * 1000000 }}{% endif %}",
        "{% for m in messages %}{{ '  ' * (loop.index0 * 2 + 1) }}{% endfor %}",
        "{{ [0] * 100 }}{{ 10 ** 6 }}",
    ] {
        templates(source);
    }
}

#[test]
fn guarded_steps_give_what_the_library_gives() {
    let source = "{{ 1 + 2 }} {{ 1.5 + 2 }} {{ 'a' + 'b' }} {{ [1] + [2] }} {{ 2 * 3 }} {{ 'ab' * 2 }} \
            {{ 1 ~ 'b' }} {{ 2 - 1 }} {{ 1 < 2 }} {{ 'a' in 'abc' }} {{ 'role' in messages[0] }} \
            {{ messages[-1].role }} {{ messages[::-1][0]['role'] }} {{ messages[1:]|length }} {{ 'abcd'[-2:] }} \
            {{ 'abcd'[::-1] }} {{ 'abcd'[3:0:-2] }} {{ [1, 2, 3][:-1] }} {{ (1, 2)[1:] }} {{ {'a': 1}.items()|list }} \
            {{ ['b', 'a']|sort|join(',') }} {{ messages|map(attribute='role')|join(' ') }} {{ 'a-b'|replace('-', '+') }} \
            {{ messages|selectattr('role', 'equalto', 'user')|list|length }} {{ [1, 2]|sum }} {{ 3 == 3.0 }} \
            {% for i in range(3) if i != 1 %}{{ i }}{{ loop.last }}{% else %}none{% endfor %} \
            {% macro m(x, y=2) %}<{{ x }}{{ y }}>{% endmacro %}{{ m(1) }} {% block b %}in{% endblock %} \
            {% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }} \
            {{ 'yes' if 1 and not 0 else 'no' }} {{ missing is defined }} {{ missing|default('d') }} {{ 'x'.upper() }}";
    let rendered = templates(source).render(&conversation(End::Closed));
    assert_eq!(
        rendered.unwrap(),
        "3 3.5 ab [1, 2] 6 abab 1b 1 True True True assistant assistant 1 cd dcba db [1, 2] (2,) [('a', 1)] \
            a,b user assistant a+b 1 3 True 0False2True <12> in 3 yes False d X"
    );
}

#[test]
fn values_of_a_body_are_sliced_as_the_library_slices() {
    let text = r#"[{"role":"a"},{"role":"b"},{"role":"c"},{"role":"d"},{"role":"e"}]"#;
    let source = "{% for part in [messages, messages[1:], messages[::-1], messages[1:4][::-1], messages[::2][1:], \
            messages[-2:], messages[:-2], messages[4:0:-2], messages[::-1][1:3], messages[::-2][::-1], messages[9:], \
            messages[-9:2]] %}{{ part|length }}:{{ part|map(attribute='role')|join(',') }};{{ part }};\
            {% if part %}{{ part[-1].role }}{{ part[0]['role'] }}{{ part|last }}{% endif %} {% endfor %}";
    let document = crate::json::Document::check(text.to_owned()).unwrap();
    let of_body = crate::model::value_of(&document.part(document.root()), document.root());
    let of_serde = Value::from(Serde(
        serde_json::from_str::<serde_json::Value>(text).unwrap(),
    ));
    let rendered = |messages| {
        let conversation = Conversation {
            messages,
            ..conversation(End::Closed)
        };
        templates(source).render(&conversation).unwrap()
    };
    assert_eq!(rendered(of_body), rendered(of_serde));
}

#[test]
fn python_values_were_spelt_as_in_rust() {
    let source = "{{ none }} {{ true }} {{ [1, 'a', none] }} {{ {'a': false} }} {{ 1.0 }} {{ 7 // 2 }} {{ 'ab'[::-1] }}";
    assert_eq!(
        templates(source)
            .render(&conversation(End::Closed))
            .unwrap(),
        "None True [1, 'a', None] {'a': False} 1.0 3 ba"
    );
}
