//! Whether an answer is right: stated rules, and nobody's judgement. `shared/docs/FIELD-TEST.md` tells them to people.

/// What says that a fact isn't there, after [`normalise`].
pub(super) const NOT_STATED: [&str; 28] = [
    "not stated",
    "not mentioned",
    "not given",
    "not provided",
    "not specified",
    "not said",
    "not told",
    "not known",
    "not in the passage",
    "not in the text",
    "does not say",
    "doesn t say",
    "does not state",
    "doesn t state",
    "does not mention",
    "doesn t mention",
    "does not specify",
    "doesn t specify",
    "does not tell",
    "doesn t tell",
    "no information",
    "no mention",
    "i do not know",
    "i don t know",
    "cannot be determined",
    "can t be determined",
    "cannot answer",
    "can t answer",
];
/// An answer that names more different numbers than this is a list, which is no answer.
const MAX_NUMBERS: usize = 3;
/// How far a number may be off, as a share, where nothing else was said: for what decimals do.
const ROUNDING: f64 = 1e-9;

/// What the right answer is.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Expected {
    /// One of these texts is in it, as whole words.
    Text(Vec<String>),
    /// This number is in it, give or take.
    Number { value: f64, tolerance: f64 },
    /// It says that the passage doesn't say.
    NotStated,
}

/// Right or wrong. Wrong is whatever has one of `never` in it, and an answer to a question about a stated fact that
/// also says that it isn't stated.
pub(super) fn is_right(expected: &Expected, never: &[String], answer: &str) -> bool {
    let said = normalise(answer);
    if never.iter().any(|text| has(&said, &normalise(text))) {
        return false;
    }
    let denies = NOT_STATED.iter().any(|phrase| has(&said, phrase));
    match expected {
        Expected::NotStated => denies,
        Expected::Text(any) => !denies && any.iter().any(|text| has(&said, &normalise(text))),
        Expected::Number { value, tolerance } => {
            let mut numbers = numbers(answer);
            numbers.sort_by(f64::total_cmp);
            numbers.dedup();
            let margin = tolerance.max(value.abs() * ROUNDING);
            !denies && numbers.len() <= MAX_NUMBERS && numbers.iter().any(|n| (n - value).abs() <= margin)
        }
    }
}

/// Small letters and digits, and one space for everything else.
pub(super) fn normalise(text: &str) -> String {
    let letters: String = text
        .chars()
        .flat_map(char::to_lowercase)
        .map(|c| if c.is_alphanumeric() { c } else { ' ' })
        .collect();
    letters.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether whole words of a normalised text are `words`.
fn has(said: &str, words: &str) -> bool {
    !words.is_empty() && format!(" {said} ").contains(&format!(" {words} "))
}

/// Every number of a text: digits with commas between thousands and a decimal point, or English words up to
/// hundreds of thousands.
pub(super) fn numbers(text: &str) -> Vec<f64> {
    let mut found = Vec::new();
    let mut words: Option<Spoken> = None;
    for token in tokens(text) {
        match (spoken(&token), words.as_mut()) {
            (Some(part), Some(number)) if number.goes_on_with(part) => number.take(part),
            (Some(part), _) => {
                found.extend(words.take().and_then(Spoken::value));
                let mut number = Spoken::default();
                number.take(part);
                words = Some(number);
            }
            // “two hundred and five”
            (None, Some(number)) if token == "and" && number.last == Some(Part::Scale(100)) => {}
            (None, _) => {
                found.extend(words.take().and_then(Spoken::value));
                found.extend(digits(&token));
            }
        }
    }
    found.extend(words.and_then(Spoken::value));
    found
}

/// Words, runs of digits with the points and commas inside them, and the marks between parts of a sentence.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens = vec![String::new()];
    let chars: Vec<char> = text.chars().collect();
    for (i, c) in chars.iter().enumerate() {
        let last = tokens.last().and_then(|t| t.chars().last());
        let next_is_digit = chars.get(i + 1).is_some_and(char::is_ascii_digit);
        let inside = matches!(c, '.' | ',') && last.is_some_and(|l| l.is_ascii_digit()) && next_is_digit;
        let sign = *c == '-' && last.is_none() && next_is_digit && (i == 0 || chars[i - 1].is_whitespace());
        let same = last.is_none_or(|l| l.is_alphabetic() == c.is_alphabetic());
        if inside || sign || (c.is_alphanumeric() && same) {
            if let Some(token) = tokens.last_mut() {
                token.extend(c.to_lowercase());
            }
        } else {
            tokens.push(if c.is_alphanumeric() { c.to_lowercase().collect() } else { String::new() });
            if matches!(c, ',' | ';' | '.' | ':' | '!' | '?') {
                tokens.extend([c.to_string(), String::new()]);
            }
        }
    }
    tokens.retain(|t| !t.is_empty());
    tokens
}

fn digits(token: &str) -> Option<f64> {
    token.replace(',', "").parse().ok().filter(|_| token.contains(|c: char| c.is_ascii_digit()))
}

/// A word of a spoken number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Unit(u32),
    Tens(u32),
    Scale(u32),
}

/// A number made of words so far.
#[derive(Debug, Default)]
struct Spoken {
    thousands: u32,
    rest: u32,
    last: Option<Part>,
}

impl Spoken {
    fn goes_on_with(&self, part: Part) -> bool {
        match (self.last, part) {
            (None | Some(Part::Scale(_)), Part::Unit(_) | Part::Tens(_)) => true,
            (Some(Part::Tens(_)), Part::Unit(n)) => n < 10,
            (Some(_), Part::Scale(100)) => self.rest < 100,
            (Some(_), Part::Scale(_)) => self.thousands == 0,
            _ => false,
        }
    }

    fn take(&mut self, part: Part) {
        match part {
            Part::Unit(n) | Part::Tens(n) => self.rest += n,
            Part::Scale(100) => self.rest = self.rest.max(1) * 100,
            Part::Scale(_) => (self.thousands, self.rest) = (self.rest.max(1), 0),
        }
        self.last = Some(part);
    }

    fn value(self) -> Option<f64> {
        self.last.map(|_| f64::from(self.thousands) * 1000.0 + f64::from(self.rest))
    }
}

fn spoken(word: &str) -> Option<Part> {
    const UNITS: [&str; 20] = [
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
    ];
    const TENS: [&str; 8] = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"];
    let at = |words: &[&str]| words.iter().position(|w| *w == word).and_then(|i| u32::try_from(i).ok());
    match word {
        "hundred" => Some(Part::Scale(100)),
        "thousand" => Some(Part::Scale(1000)),
        _ => at(&UNITS).map(Part::Unit).or_else(|| at(&TENS).map(|i| Part::Tens(10 * (i + 2)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(any: &[&str]) -> Expected {
        Expected::Text(any.iter().map(|t| (*t).to_owned()).collect())
    }

    #[test]
    fn texts_are_whole_words_whatever_their_dress() {
        let right = |answer| is_right(&text(&["Ada Quill", "the pilot"]), &[], answer);
        assert!(right("It was *Ada  Quill*."));
        assert!(right("ADA-QUILL did it"));
        assert!(right("It was the pilot, I think."));
        for wrong in ["Adaquill", "Ada Quillon", "the pilots", "", "Ada", "Ada or Quill"] {
            assert!(!right(wrong), "{wrong}");
        }
        assert!(is_right(&text(&["Grüße"]), &[], "„GRÜSSE“ oder GRÜẞE: Grüße"));
    }

    #[test]
    fn a_hedge_is_wrong_and_so_is_what_must_never_be_said() {
        assert!(!is_right(&text(&["amber"]), &[], "Not stated. Maybe amber."));
        assert!(!is_right(&text(&["amber"]), &["salt".to_owned()], "Amber and salt."));
        assert!(!is_right(&Expected::NotStated, &["green".to_owned()], "It does not say, but it was green."));
    }

    #[test]
    fn a_fact_that_is_not_there_must_be_said_not_to_be_there() {
        for right in ["Not stated.", "The passage doesn’t say.", "There is no mention of it.", "I DON'T KNOW"]
        {
            assert!(is_right(&Expected::NotStated, &[], right), "{right}");
        }
        for wrong in ["", "Her name was Ilse.", "It is stated", "nothing"] {
            assert!(!is_right(&Expected::NotStated, &[], wrong), "{wrong}");
        }
    }

    #[test]
    fn numbers_in_digits_and_in_words() {
        assert_eq!(numbers("1,204 barrels, 3.5 m; at -4 or 10-12."), [1204.0, 3.5, -4.0, 10.0, 12.0]);
        assert_eq!(numbers("seventeen, forty-two and two hundred and five"), [17.0, 42.0, 205.0]);
        assert_eq!(numbers("three hundred twelve thousand four hundred one"), [312_401.0]);
        assert_eq!(numbers("one two three"), [1.0, 2.0, 3.0]);
        assert_eq!(numbers("a hundred; thousand"), [100.0, 1000.0]);
        assert_eq!(numbers("no number, nonesuch, often"), Vec::<f64>::new());
        assert_eq!(numbers("in 1887."), [1887.0]);
    }

    #[test]
    fn a_number_may_be_off_by_its_tolerance_and_a_list_is_no_answer() {
        let right = |value, tolerance, answer| is_right(&Expected::Number { value, tolerance }, &[], answer);
        assert!(right(17.0, 0.0, "There were seventeen lamps."));
        assert!(right(0.1, 0.0, "0.1"));
        assert!(right(17.0, 0.5, "about 17.4"));
        assert!(!right(17.0, 0.0, "170"));
        assert!(!right(17.0, 0.0, "18"));
        assert!(right(17.0, 0.0, "17 of 20, that is 17"));
        assert!(!right(17.0, 0.0, "14, 15, 16, 17"));
    }

    #[test]
    fn the_guide_tells_every_phrase() {
        let guide = include_str!("../../../../shared/docs/FIELD-TEST.md").replace(['\'', '’'], " ");
        for phrase in NOT_STATED {
            assert!(guide.contains(&format!("`{phrase}`")), "{phrase}");
        }
    }
}
