//! Which token positions of each array have arrived.

/// Disjoint, sorted, merged ranges of token positions, one list per array.
#[derive(Debug)]
pub(super) struct Coverage {
    arrays: Vec<Vec<(u32, u32)>>,
}

impl Coverage {
    pub(super) fn new(n_arrays: usize) -> Self {
        Self { arrays: vec![Vec::new(); n_arrays] }
    }

    /// Adds `start..end` to an array; `false` when any of it is there already.
    #[must_use]
    pub(super) fn add(&mut self, array: usize, start: u32, end: u32) -> bool {
        let ranges = &mut self.arrays[array];
        let at = ranges.partition_point(|&(_, e)| e <= start);
        if ranges.get(at).is_some_and(|&(s, _)| s < end) {
            return false;
        }
        let joins_left = at > 0 && ranges[at - 1].1 == start;
        let joins_right = ranges.get(at).is_some_and(|&(s, _)| s == end);
        match (joins_left, joins_right) {
            (true, true) => {
                ranges[at - 1].1 = ranges[at].1;
                ranges.remove(at);
            }
            (true, false) => ranges[at - 1].1 = end,
            (false, true) => ranges[at].0 = start,
            (false, false) => ranges.insert(at, (start, end)),
        }
        true
    }

    /// Whether every array has exactly `start..end`, no less and no more.
    #[must_use]
    pub(super) fn is_exactly(&self, start: u32, end: u32) -> bool {
        self.arrays.iter().all(|ranges| ranges.as_slice() == [(start, end)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn gaps_doubles_and_surplus_are_noticed() {
        let mut c = Coverage::new(2);
        assert!(c.add(0, 0, 4) && c.add(0, 8, 10) && !c.add(0, 3, 5) && !c.add(0, 9, 10));
        assert!(c.add(0, 4, 8) && c.add(1, 0, 9));
        assert!(!c.is_exactly(0, 10));
        assert!(c.add(1, 9, 10));
        assert!(c.is_exactly(0, 10) && !c.is_exactly(0, 9) && !c.is_exactly(0, 11));
    }

    proptest! {
        #[test]
        fn agrees_with_a_bitmap(pieces in prop::collection::vec((0u32..40, 1u32..8), 0..60)) {
            let (mut c, mut seen) = (Coverage::new(1), [false; 48]);
            for (start, n) in pieces {
                let cells = &mut seen[start as usize..(start + n) as usize];
                let free = !cells.iter().any(|&b| b);
                prop_assert_eq!(c.add(0, start, start + n), free);
                if free {
                    cells.fill(true);
                }
            }
            for start in 0..48usize {
                for end in start + 1..=48 {
                    let exact = seen.iter().enumerate().all(|(i, &b)| b == (start..end).contains(&i));
                    prop_assert_eq!(c.is_exactly(start as u32, end as u32), exact);
                }
            }
        }
    }
}
