//! Constraints over a byte vocabulary with a few longer tokens.

use super::*;
use shared::control::Constraint;
use shared::tokenizer::Tokenizer;

/// A byte-level vocabulary: 256 bytes, some longer tokens, two special tokens.
pub(super) fn tokenizer() -> Tokenizer {
    let spell = |byte: u8| -> char {
        match byte {
            0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
            _ => {
                let rank =
                    (0..byte).filter(|b| !matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF)).count();
                char::from_u32(0x100 + rank as u32).unwrap()
            }
        }
    };
    let mut vocab = serde_json::Map::new();
    for byte in 0..=255u8 {
        vocab.insert(spell(byte).to_string(), byte.into());
    }
    for token in ["{\"", "\":", "true", "\"}", "123", "\u{120}\"", "<|x|>"] {
        vocab.insert(token.to_owned(), vocab.len().into());
    }
    let special = |id: usize, content: &str| {
        serde_json::json!({"id": id, "content": content, "special": true, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false})
    };
    let n = vocab.len();
    let definition = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [special(n, "<|end|>"), special(n + 1, "<|start|>")],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    Tokenizer::from_json(definition.to_string().as_bytes()).unwrap()
}

const END: u32 = 263;
const START: u32 = 264;
/// More logits than tokens, as models have.
const VOCAB: usize = 272;

fn compiler() -> Compiler {
    Compiler::new(&tokenizer(), VOCAB, &[END]).unwrap()
}

fn schema(text: &str) -> Constraint {
    Constraint::JsonSchema { schema: text.to_owned() }
}

/// Whether the text, byte by byte and then ended, satisfies the constraint.
fn accepts(matcher: &Matcher, text: &str) -> bool {
    let mut matcher = matcher.clone();
    for token in text.bytes().map(u32::from).chain([END]) {
        let mask = matcher.mask().unwrap();
        assert!(!mask.is_empty());
        assert!(!mask.allows(START), "a special token inside");
        assert!(
            (VOCAB as u32 - 7..VOCAB as u32).all(|token| !mask.allows(token)),
            "a token that does not exist"
        );
        // The mask narrows a forced text to the tokens that the model would use; the matcher takes any spelling.
        if matcher.accept(token).is_err() {
            return false;
        }
    }
    assert!(matcher.is_finished());
    true
}

#[test]
fn each_kind_accepts_its_language() {
    let compiler = compiler();
    let cases: [(Constraint, &[&str], &[&str]); 5] = [
        (
            Constraint::JsonObject,
            &["{}", "{\"a\": [1, {\"b\": null}]}", "{\n  \"a\": true\n}"],
            &["[]", "1", "{", "{}x"],
        ),
        (
            schema(
                r#"{"type":"object","properties":{"n":{"type":"integer","minimum":3}},"required":["n"],"additionalProperties":false}"#,
            ),
            &["{\"n\":3}", "{ \"n\" : 12 }"],
            &["{}", "{\"n\":2}", "{\"n\":3,\"m\":1}", "{\"n\":\"3\"}"],
        ),
        (Constraint::Regex { pattern: "(ab)+c?".to_owned() }, &["ab", "ababc"], &["", "abcab", "a", "xab"]),
        (
            Constraint::Lark { grammar: "start: sum\nsum: NUMBER (\"+\" sum)?\nNUMBER: /[0-9]+/".to_owned() },
            &["1", "1+22+3"],
            &["+", "1+", "1 + 2"],
        ),
        (Constraint::Regex { pattern: "é{2}".to_owned() }, &["éé"], &["é", "e"]),
    ];
    for (constraint, good, bad) in cases {
        let matcher = compiler.compile(&constraint).unwrap();
        for text in good {
            assert!(accepts(&matcher, text), "{constraint:?} refuses {text:?}");
        }
        for text in bad {
            assert!(!accepts(&matcher, text), "{constraint:?} takes {text:?}");
        }
    }
}

#[test]
fn the_end_comes_exactly_where_the_grammar_may_end() {
    let mut matcher = compiler().compile(&Constraint::Regex { pattern: "ab(cd)?".to_owned() }).unwrap();
    assert_eq!(matcher.end_tokens(), [END]);
    let mut ends = Vec::new();
    for token in "abcd".bytes() {
        ends.push(matcher.mask().unwrap().allows(END));
        assert!(!matcher.is_finished());
        matcher.accept(u32::from(token)).unwrap();
    }
    assert_eq!(ends, [false, false, true, false]);
    assert!(matcher.is_finished());
    assert_eq!(matcher.mask().unwrap(), TokenMask::from_tokens(VOCAB, &[END]));
    matcher.accept(END).unwrap();
    assert!(matcher.is_finished());
    assert!(matcher.accept(u32::from(b'a')).is_err());
}

#[test]
fn text_that_spells_a_special_token_stays_text() {
    let mut matcher = compiler().compile(&schema(r#"{"const":"<|start|>"}"#)).unwrap();
    let mut text = Vec::new();
    while !matcher.is_finished() {
        let mask = matcher.mask().unwrap();
        assert!(!mask.allows(START));
        let token = (0..VOCAB as u32).find(|&token| mask.allows(token)).unwrap();
        text.extend(tokenizer().token_bytes(token).unwrap());
        matcher.accept(token).unwrap();
    }
    assert_eq!(text, br#""<|start|>""#);
    let lark = Constraint::Lark { grammar: "start: <|start|>".to_owned() };
    assert!(matches!(compiler().compile(&lark), Err(ConstraintError::Invalid { .. })));
}

#[test]
fn a_clone_goes_its_own_way() {
    let mut first = compiler().compile(&Constraint::Regex { pattern: "a(b|c)d".to_owned() }).unwrap();
    first.accept(u32::from(b'a')).unwrap();
    let mut second = first.clone();
    first.accept(u32::from(b'b')).unwrap();
    second.accept(u32::from(b'c')).unwrap();
    for mut matcher in [first, second] {
        assert!(matcher.accept(u32::from(b'd')).is_ok());
        assert!(matcher.is_finished());
    }
}

#[test]
fn bad_constraints_say_why() {
    let compiler = compiler();
    let message = |constraint: &Constraint| compiler.compile(constraint).unwrap_err().to_string();
    for (constraint, part) in [
        (schema("{"), "EOF"),
        (schema("[1]"), "schema"),
        (schema("false"), "nsatisfiable"),
        (schema(r#"{"type":"nothing"}"#), "nothing"),
        (schema(&"[".repeat(200)), "nested"),
        (schema(&" ".repeat(1 << 20)), "bytes"),
        (Constraint::Regex { pattern: "a(".to_owned() }, "regular expression"),
        (Constraint::Lark { grammar: "start: missing".to_owned() }, "missing"),
        (Constraint::Lark { grammar: String::new() }, "grammar"),
    ] {
        let message = message(&constraint);
        assert!(message.contains(part), "{constraint:?}: {message}");
        assert!(message.len() < 700 && !message.contains("backtrace"), "{message}");
    }
    let none = Compiler::new(&tokenizer(), VOCAB, &[9999]).unwrap_err();
    assert!(matches!(none, ConstraintError::Vocabulary(_)));
}

#[test]
fn white_space_is_that_of_a_layout() {
    let matcher = compiler().compile(&Constraint::JsonObject).unwrap();
    let deep = "[\n".to_owned() + &" ".repeat(32);
    for text in [
        r#"{"a":1}"#,
        r#"{ "a" : 1 , "b":  2 }"#,
        "{\n  \"a\": [\n    1,\n    2\n  ]\n}",
        "{\r\n\t\"a\": 1\r\n}",
        "{\n\t\t\"a\":\t1}",
        &format!("{{\"a\": {deep}1]}}"),
    ] {
        assert!(accepts(&matcher, text), "{text:?}");
    }
    // Not for ever: a model that likes empty lines would spend its whole budget on them.
    for text in
        ["{\n\n", "{\n \n", "{ \n", "{\"a\":\r\r", &format!("{{\"a\": {deep} "), "{         ", "{\t\t\t"]
    {
        assert!(accepts_beginning(&matcher, &text[..text.len() - 1]), "before the end of {text:?}");
        assert!(!accepts_beginning(&matcher, text), "{text:?}");
    }
}

/// Whether the text may come first.
fn accepts_beginning(matcher: &Matcher, text: &str) -> bool {
    let mut matcher = matcher.clone();
    text.bytes().all(|byte| matcher.accept(u32::from(byte)).is_ok())
}
