//! Tests of rendering.

use super::*;
use serde_json::json;

fn render(text: &str, messages: &Value) -> Result<String, TemplateError> {
    ChatTemplate::from_text(text, Map::new())?.render(messages, None, true, &Map::new())
}

#[test]
fn blocks_are_trimmed_as_transformers_trims_them() {
    let text =
        "{% for m in messages %}\n  {%- if true %}\n[{{ m.role }}]\n    {% endif %}\n{% endfor %}\nend\n";
    assert_eq!(render(text, &json!([{"role": "a"}, {"role": "b"}])).unwrap(), "[a]\n[b]\nend");
}

#[test]
fn python_methods_and_loop_controls_work() {
    let text = "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}\
                {{ m['content'].strip().split(' ')[0].upper() }}{{ m.get('x', 'none') }}{% endfor %}";
    assert_eq!(render(text, &json!([{"content": " ab cd "}, {"content": "no"}])).unwrap(), "ABnone");
}

#[test]
fn generation_tags_change_nothing() {
    let text = "a {%- generation -%} b {%- endgeneration %} c{% generation %}\nd{% endgeneration %}";
    assert_eq!(render(text, &json!([])).unwrap(), "ab cd");
}

#[test]
fn exceptions_carry_the_templates_words() {
    let error = render("{{ raise_exception('roles must alternate') }}", &json!([])).unwrap_err();
    assert!(matches!(&error, TemplateError::Raised(m) if m == "roles must alternate"), "{error:?}");
    let nested = "{% macro f() %}{{ raise_exception('inner') }}{% endmacro %}{{ f() }}";
    assert!(matches!(render(nested, &json!([])).unwrap_err(), TemplateError::Raised(m) if m == "inner"));
}

#[test]
fn json_is_pythons() {
    let text = "{{ messages | tojson }}|{{ messages | tojson(indent=1) }}";
    let got = render(text, &json!([{"b": "<é'>", "a": 1}])).unwrap();
    assert_eq!(got, "[{\"b\": \"<é'>\", \"a\": 1}]|[\n {\n  \"b\": \"<é'>\",\n  \"a\": 1\n }\n]");
}

#[test]
fn the_date_can_be_asked_for() {
    let year = render("{{ strftime_now('%Y') }}", &json!([])).unwrap();
    assert!(year.parse::<u32>().is_ok_and(|y| y >= 2024), "{year}");
    assert!(matches!(render("{{ strftime_now('%') }}", &json!([])), Err(TemplateError::Render(_))));
}

#[test]
fn bad_arguments_are_errors() {
    let chatml = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}";
    for messages in
        [json!(3), json!([3]), json!([{"role": "user"}]), json!([{"role": 1, "content": {"a": []}}])]
    {
        assert!(matches!(render(chatml, &messages), Err(TemplateError::Render(_))), "{messages}");
    }
    assert!(matches!(render("{% if %}", &json!([])), Err(TemplateError::Syntax(_))));
    assert!(matches!(render("{% include 'x' %}", &json!([])), Err(TemplateError::Render(_))));
    let endless = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
    assert!(matches!(render(endless, &json!([])), Err(TemplateError::Render(_))));
}

#[test]
fn extra_variables_do_not_replace_the_conversation() {
    let template = ChatTemplate::from_text("{{ messages[0] }}{{ thinking }}{{ tools }}", Map::new()).unwrap();
    let extra = json!({"messages": ["evil"], "tools": 1, "thinking": true});
    let got = template.render(&json!(["good"]), None, false, extra.as_object().unwrap()).unwrap();
    assert_eq!(got, "goodTrueNone");
}

#[test]
fn directories_may_hold_templates_in_several_places() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("tokenizer_config.json");
    std::fs::write(&config, r#"{"eos_token": "</s>"}"#).unwrap();
    assert!(matches!(ChatTemplate::open(dir.path()), Err(TemplateError::Absent)));
    let list = json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": [
        {"name": "default", "template": "{{ bos_token }}D"}, {"name": "tool_use", "template": "T{{ eos_token }}"}]});
    std::fs::write(&config, list.to_string()).unwrap();
    let template = ChatTemplate::open(dir.path()).unwrap();
    assert_eq!(template.render(&json!([]), None, false, &Map::new()).unwrap(), "<s>D");
    assert_eq!(template.render(&json!([]), Some(&json!([])), false, &Map::new()).unwrap(), "T</s>");
    let before = template.digest();
    std::fs::write(dir.path().join("chat_template.jinja"), "J\n").unwrap();
    let template = ChatTemplate::open(dir.path()).unwrap();
    assert_eq!(template.render(&json!([]), None, false, &Map::new()).unwrap(), "J");
    assert_ne!(template.digest(), before);
}
