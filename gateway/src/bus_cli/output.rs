//! Output of nodes on this terminal, whole lines under each node's name where there are several.

use shared::bus::NodeId;
use std::io::{self, Write};

/// A line longer than this is shown in pieces.
const MAX_LINE_BYTES: usize = 64 << 10;

/// A model's words, which must not steer this terminal: without control characters, line breaks and tabs apart.
pub(super) fn printable_lines(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '?' } else { c }).collect()
}

/// Where one stream of one node goes.
pub(super) struct Lines {
    prefix: Option<String>,
    part: Vec<u8>,
}

impl Lines {
    /// Bytes as they come, or whole lines that start with the node's name.
    pub(super) fn new(node: &NodeId, named: bool) -> Self {
        Self { prefix: named.then(|| format!("{node}: ")), part: Vec::new() }
    }

    /// Writes what can be written.
    ///
    /// # Errors
    /// When `to` takes no more.
    pub(super) fn write(&mut self, bytes: &[u8], to: &mut impl Write) -> io::Result<()> {
        let Some(prefix) = &self.prefix else {
            to.write_all(bytes)?;
            return to.flush();
        };
        for line in bytes.split_inclusive(|b| *b == b'\n') {
            self.part.extend_from_slice(line);
            if line.ends_with(b"\n") || self.part.len() > MAX_LINE_BYTES {
                if !self.part.ends_with(b"\n") {
                    self.part.push(b'\n');
                }
                to.write_all(prefix.as_bytes())?;
                to.write_all(&self.part)?;
                self.part.clear();
            }
        }
        to.flush()
    }

    /// Writes a last line without a line break.
    ///
    /// # Errors
    /// When `to` takes no more.
    pub(super) fn finish(&mut self, to: &mut impl Write) -> io::Result<()> {
        if self.part.is_empty() { Ok(()) } else { self.write(b"\n", to) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_several_nodes_stay_whole() {
        let (a, b) = (NodeId::new("a").unwrap(), NodeId::new("b").unwrap());
        let (mut to_a, mut to_b, mut out) = (Lines::new(&a, true), Lines::new(&b, true), Vec::new());
        to_a.write(b"on", &mut out).unwrap();
        to_b.write(b"x\ny", &mut out).unwrap();
        to_a.write(b"e\ntwo\n", &mut out).unwrap();
        to_b.finish(&mut out).unwrap();
        to_a.finish(&mut out).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "b: x\na: one\na: two\nb: y\n");
        let (mut alone, mut out) = (Lines::new(&a, false), Vec::new());
        alone.write(b"\xff\0half", &mut out).unwrap();
        assert_eq!(out, b"\xff\0half");
    }
}
