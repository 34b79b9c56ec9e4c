//! Templates compared with the library, and templates that grow without end.

mod hostile;

use super::*;
use hostile::{HOSTILE, HostileEnding};
use minijinja::value::Serde;
use serde_json::json;

fn templates(source: &str) -> ChatTemplates {
    let special = json!({"bos_token": "<s>"}).as_object().cloned().unwrap();
    ChatTemplates::new(vec![("default".into(), source.into())], special).unwrap()
}

fn conversation(end: RenderEnd) -> TemplateInput {
    let messages = json!([
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": " Sure, Hi "},
    ]);
    TemplateInput {
        messages: TemplateValue(Value::from(Serde(messages))),
        body_bytes: 100,
        tools: None,
        documents: None,
        variables: None,
        last_content: Some(" Sure, Hi ".to_owned()),
        end,
    }
}

#[test]
fn generation_marks_render_as_plain_blocks() {
    let source = "{% for m in messages %}\n{%- generation -%} [{{ m.content }}] {% endgeneration %}\n{% endfor %}";
    assert_eq!(
        templates(source)
            .render(&conversation(RenderEnd::Closed))
            .unwrap(),
        "[Hi] [ Sure, Hi ] "
    );
}

#[test]
fn an_endless_template_is_stopped() {
    let source = "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}";
    let error = templates(source)
        .render(&conversation(RenderEnd::Closed))
        .unwrap_err();
    assert!(
        matches!(error, RenderError::OutOfFuel | RenderError::OutOfBytes(_)),
        "{error}"
    );
}

/// Qwen's templates count the messages for each of them.
#[test]
fn long_conversations_of_short_messages_are_rendered() {
    let source = "{% for m in messages[::-1] %}{% set index = (messages|length - 1) - loop.index0 %}\
                  {{ m.content }}{{ index }} {% endfor %}";
    let message = json!({"role": "user", "content": "w"});
    let messages = vec![message; 20_000];
    let input = TemplateInput {
        body_bytes: 35 * messages.len(),
        messages: TemplateValue(Value::from(Serde(json!(messages)))),
        ..conversation(RenderEnd::Closed)
    };
    let text = templates(source).render(&input).unwrap();
    assert!(text.starts_with("w19999 w19998 ") && text.ends_with("w0 "));
}

#[test]
fn every_kind_of_template_step_checks_the_time_limit() {
    // Each template is far from the limits of instructions and of bytes.
    for source in [
        "{% for a in range(3) %}{% endfor %}",
        "{% for a in messages %}{% if a.role == 'user' %}{% endif %}{% endfor %}",
        "{{ messages[0] is defined and messages[0]['role'] in 'user' }}",
        "{{ messages[0].content }}",
        "{{ 'a'|upper }}",
        "{{ 'a'.upper() }}",
        "{{ messages[1:] }}",
        "{{ bos_token ~ bos_token }}",
        "{% macro m() %}{% endmacro %}{{ m() }}",
        "text",
    ] {
        let conversation = conversation(RenderEnd::Closed);
        let templates = templates(source);
        let in_time = templates.render_within(&conversation, TIME_MAX);
        assert!(in_time.is_ok(), "{source}: {in_time:?}");
        let late = templates.render_within(&conversation, Duration::ZERO);
        assert!(
            matches!(late, Err(RenderError::OutOfFuel)),
            "{source}: {late:?}"
        );
    }
}

#[test]
fn a_continued_last_message_is_left_open() {
    let plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}";
    let unstripped = templates(plain)
        .render(&conversation(RenderEnd::LastMessage))
        .unwrap();
    assert_eq!(unstripped, "<user>Hi</><assistant> Sure, Hi ");
    let strip = "{% for m in messages %}<{{ m.role }}>{{ m.content.strip() }}</>{% endfor %}";
    let stripped = templates(strip)
        .render(&conversation(RenderEnd::LastMessage))
        .unwrap();
    assert_eq!(stripped, "<user>Hi</><assistant>Sure, Hi");
    let drops = "{{ bos_token }}";
    assert!(
        templates(drops)
            .render(&conversation(RenderEnd::LastMessage))
            .is_err()
    );
}

#[test]
fn templates_that_grow_without_end_are_stopped() {
    let mut wrong = Vec::new();
    for (ended, source) in HOSTILE {
        let rendered = templates(source).render(&conversation(RenderEnd::Closed));
        let is_right = match (&rendered, ended) {
            (Err(RenderError::OutOfBytes(_)), HostileEnding::Bytes) => true,
            (Err(RenderError::Refused(reason)), HostileEnding::Refused(part)) => {
                reason.contains(part)
            }
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
fn template_sources_with_huge_constants_are_refused() {
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
fn ordinary_constant_expressions_compile() {
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
fn budget_checks_change_no_result() {
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
    let rendered = templates(source).render(&conversation(RenderEnd::Closed));
    assert_eq!(
        rendered.unwrap(),
        "3 3.5 ab [1, 2] 6 abab 1b 1 True True True assistant assistant 1 cd dcba db [1, 2] (2,) [('a', 1)] \
            a,b user assistant a+b 1 3 True 0False2True <12> in 3 yes False d X"
    );
}

#[test]
fn body_lists_are_sliced_as_minijinja_slices() {
    let text = r#"[{"role":"a"},{"role":"b"},{"role":"c"},{"role":"d"},{"role":"e"}]"#;
    let source = "{% for part in [messages, messages[1:], messages[::-1], messages[1:4][::-1], messages[::2][1:], \
            messages[-2:], messages[:-2], messages[4:0:-2], messages[::-1][1:3], messages[::-2][::-1], messages[9:], \
            messages[-9:2]] %}{{ part|length }}:{{ part|map(attribute='role')|join(',') }};{{ part }};\
            {% if part %}{{ part[-1].role }}{{ part[0]['role'] }}{{ part|last }}{% endif %} {% endfor %}";
    let document = crate::json::Document::check(text.to_owned()).unwrap();
    let of_body = json_value::value_of(&document.part(document.root()), document.root());
    let of_serde = Value::from(Serde(
        serde_json::from_str::<serde_json::Value>(text).unwrap(),
    ));
    let rendered = |messages| {
        let conversation = TemplateInput {
            messages: TemplateValue(messages),
            ..conversation(RenderEnd::Closed)
        };
        templates(source).render(&conversation).unwrap()
    };
    assert_eq!(rendered(of_body), rendered(of_serde));
}

#[test]
fn values_are_spelled_as_in_python() {
    let source = "{{ none }} {{ true }} {{ [1, 'a', none] }} {{ {'a': false} }} {{ 1.0 }} {{ 7 // 2 }} {{ 'ab'[::-1] }}";
    assert_eq!(
        templates(source)
            .render(&conversation(RenderEnd::Closed))
            .unwrap(),
        "None True [1, 'a', None] {'a': False} 1.0 3 ba"
    );
}
