//! Random JSON schemas whose answers are finite: every string, array and number range has an end.

use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};

const NAMES: [&str; 16] = [
    "name",
    "age",
    "city",
    "tags",
    "score",
    "id",
    "kind",
    "active",
    "notes",
    "price",
    "größe",
    "first-name",
    "x",
    "items",
    "created",
    "a b",
];
const WORDS: [&str; 10] =
    ["red", "green", "blue", "north", "süd", "a \"quoted\" word", "", "no/yes", "line\nbreak", "42"];
const PATTERNS: [&str; 6] = [
    "^[A-Z]{2}[0-9]{3}$",
    "^(yes|no|maybe)$",
    "^[a-z]{1,8}(-[a-z]{1,8})?$",
    "^#[0-9a-f]{6}$",
    "^\\d{3}-\\d{4}$",
    "^[^@]{1,6}@x\\.org$",
];
const FORMATS: [&str; 4] = ["date", "uuid", "ipv4", "time"];
/// Objects and arrays inside each other.
const DEPTH: u32 = 2;

/// The schema of a seed: always the same, and always an object's, as OpenAI demands.
#[must_use]
pub fn random_schema(seed: u64) -> Value {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut schema = object(&mut random, DEPTH);
    if random.random_bool(0.3) {
        let shared = scalar(&mut random);
        schema["properties"]["ref one"] = json!({"$ref": "#/$defs/shared"});
        schema["properties"]["ref two"] =
            json!({"type": "array", "items": {"$ref": "#/$defs/shared"}, "maxItems": 2});
        schema["$defs"] = json!({"shared": shared});
        if let Some(required) = schema["required"].as_array_mut() {
            required.push(json!("ref one"));
        }
    }
    schema
}

fn any(random: &mut ChaCha8Rng, depth: u32) -> Value {
    match random.random_range(0..10u32) {
        0 | 1 if depth > 0 => object(random, depth - 1),
        2 | 3 if depth > 0 => array(random, depth - 1),
        4 => json!({"anyOf": [scalar(random), {"type": "null"}]}),
        5 => json!({"anyOf": [range(random, "integer"), {"enum": ["low", "high"]}]}),
        _ => scalar(random),
    }
}

fn object(random: &mut ChaCha8Rng, depth: u32) -> Value {
    let n = random.random_range(1..=4usize);
    let mut properties = Map::new();
    while properties.len() < n {
        properties.insert(pick(random, &NAMES), any(random, depth));
    }
    // Strict mode wants all of them; the rest of the world does not.
    let strict = random.random_bool(0.5);
    let required: Vec<_> = properties.keys().filter(|_| strict || random.random_bool(0.6)).cloned().collect();
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

fn array(random: &mut ChaCha8Rng, depth: u32) -> Value {
    let least = random.random_range(0..=2u32);
    let most = least + random.random_range(0..=2u32).max(u32::from(least == 0));
    json!({"type": "array", "items": any(random, depth), "minItems": least, "maxItems": most})
}

fn scalar(random: &mut ChaCha8Rng) -> Value {
    match random.random_range(0..10u32) {
        0 => json!({"type": "boolean"}),
        1 => json!({"type": "null"}),
        2 => range(random, "integer"),
        3 => range(random, "number"),
        4 => {
            let mut words: Vec<_> =
                (0..random.random_range(1..=4u32)).map(|_| pick(random, &WORDS)).collect();
            words.sort();
            words.dedup();
            json!({"type": "string", "enum": words})
        }
        5 => {
            let values = [json!(pick(random, &WORDS)), json!(7), json!(true), json!([1, "two"])];
            json!({"const": values[random.random_range(0..values.len())]})
        }
        6 => json!({"type": "string", "pattern": pick(random, &PATTERNS)}),
        7 => json!({"type": "string", "format": pick(random, &FORMATS)}),
        8 => json!({"enum": [1, "one", null, 2.5]}),
        _ => {
            let least = random.random_range(0..=4u32);
            json!({"type": "string", "minLength": least, "maxLength": least + random.random_range(0..=10u32)})
        }
    }
}

/// Numbers between two bounds; such with a fraction in steps, or they would have no end.
fn range(random: &mut ChaCha8Rng, kind: &str) -> Value {
    let low = random.random_range(-1000..1000i64);
    let high = low + random.random_range(0..500i64);
    let mut range = json!({"type": kind});
    let exclusive = random.random_bool(0.3);
    range[if exclusive { "exclusiveMinimum" } else { "minimum" }] =
        json!(if exclusive { low - 1 } else { low });
    range["maximum"] = json!(high);
    if kind == "number" {
        range["multipleOf"] = json!(0.25);
    }
    range
}

fn pick(random: &mut ChaCha8Rng, list: &[&str]) -> String {
    list[random.random_range(0..list.len())].to_owned()
}
