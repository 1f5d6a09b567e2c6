//! Stop strings over a stream of text pieces.

/// Finds the first stop string to complete, whatever the pieces; text before it is released as soon as it
/// can't be part of one.
#[derive(Debug, Default)]
pub(crate) struct StopMatcher {
    stops: Vec<String>,
    held: String,
}

/// What a piece released.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Released {
    /// Text that belongs to the answer.
    pub(crate) text: String,
    /// A stop string completed: the answer ends after `text`.
    pub(crate) stopped: bool,
}

impl StopMatcher {
    /// A matcher for these strings, none of them empty.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        Self { stops, held: String::new() }
    }

    /// Adds a piece.
    pub(crate) fn push(&mut self, piece: &str) -> Released {
        if self.stops.is_empty() {
            return Released { text: piece.to_owned(), stopped: false };
        }
        self.held.push_str(piece);
        // The earliest end decides, so that the result does not depend on how the text was cut.
        let hit =
            self.stops.iter().filter_map(|s| self.held.find(s.as_str()).map(|at| (at + s.len(), at))).min();
        if let Some((_, at)) = hit {
            self.held.truncate(at);
            return Released { text: std::mem::take(&mut self.held), stopped: true };
        }
        let keep = self.stops.iter().map(|s| overlap(&self.held, s)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Released { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }

    /// The text still held when the stream ends: an incomplete stop string belongs to the answer.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest end of `text` that begins `stop` without completing it.
fn overlap(text: &str, stop: &str) -> usize {
    (1..stop.len())
        .rev()
        .filter(|n| stop.is_char_boundary(*n))
        .find(|n| text.ends_with(&stop[..*n]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| (*s).to_owned()).collect());
        let mut out = String::new();
        for piece in pieces {
            let released = matcher.push(piece);
            out.push_str(&released.text);
            if released.stopped {
                return (out, true);
            }
        }
        (out + &matcher.finish(), false)
    }

    #[test]
    fn stops_match_across_pieces_and_never_leak() {
        assert_eq!(run(&["END"], &["a E", "N", "D b"]), ("a ".into(), true));
        assert_eq!(run(&["END"], &["a E", "N", "X"]), ("a ENX".into(), false));
        assert_eq!(run(&["END"], &["a EN"]), ("a EN".into(), false));
        assert_eq!(run(&["🦀🦀"], &["x🦀", "🦀y"]), ("x".into(), true));
        assert_eq!(run(&["abcd", "bc"], &["ab", "cd"]), ("a".into(), true));
        assert_eq!(run(&[], &["a", "b"]), ("ab".into(), false));
    }

    #[test]
    fn what_can_not_be_a_stop_is_released_at_once() {
        let mut matcher = StopMatcher::new(vec!["END".into()]);
        assert_eq!(matcher.push("hello E").text, "hello ");
        assert_eq!(matcher.push("nough").text, "Enough");
    }

    proptest! {
        #[test]
        fn the_cut_does_not_matter(text in "[ab é]{0,40}", stops in proptest::collection::vec("[ab é]{1,4}", 1..4), step in 1usize..6) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let whole = run(&stops, &[&text]);
            let chars: Vec<char> = text.chars().collect();
            let pieces: Vec<String> = chars.chunks(step).map(|c| c.iter().collect()).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(&run(&stops, &pieces), &whole);
            prop_assert!(!whole.1 || stops.iter().all(|s| !whole.0.contains(s)));
        }
    }
}
