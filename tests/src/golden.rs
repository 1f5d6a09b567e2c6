//! What mlx-lm made of the start model (`tests/golden/make_golden.py` writes the file).

use serde::Deserialize;

/// The golden file.
#[derive(Debug, Deserialize)]
pub struct Golden {
    /// Versions and command.
    pub made_by: serde_json::Value,
    /// One entry per prompt.
    pub prompts: Vec<GoldenPrompt>,
}

/// One prompt and what mlx-lm answered, greedily and without stopping at the end token.
#[derive(Debug, Deserialize)]
pub struct GoldenPrompt {
    /// For people.
    pub name: String,
    /// Chat messages, or
    pub messages: Option<serde_json::Value>,
    /// raw text.
    pub text: Option<String>,
    /// Token ids of the rendered prompt.
    pub prompt_ids: Vec<u32>,
    /// Greedy continuation.
    pub new_ids: Vec<u32>,
    /// Best minus second-best logit at each step.
    pub gaps: Vec<f32>,
    /// The continuation as text, special tokens included.
    pub text_out: String,
    /// Per layer, for K and V over the first T − 1 positions.
    pub cache: Option<Vec<[ArrayStatistics; 2]>>,
}

/// Statistics of one cache array `[n_kv_heads, T - 1, head_dim]`.
#[derive(Debug, Deserialize)]
pub struct ArrayStatistics {
    /// Mean of all elements.
    pub mean: f64,
    /// Root mean square of all elements.
    pub rms: f64,
    /// `(head, token, dim, value)`.
    pub samples: Vec<(usize, usize, usize, f64)>,
}

/// Steps whose gap is below this may differ between two correct implementations.
pub const TIE_GAP: f32 = 1e-3;

/// Reads the golden file.
#[must_use]
pub fn load() -> Golden {
    let path = crate::paths::root().join("tests/golden/smollm2-135m-instruct.json");
    serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap()
}

impl GoldenPrompt {
    /// Compares a continuation; `Err` says where and why. A difference at a step whose gap is below [`TIE_GAP`] is
    /// returned as a note, and nothing behind it is compared: the texts are different ones from there on.
    ///
    /// # Errors
    /// The first step at which a clear choice differs.
    pub fn compare(&self, ids: &[u32]) -> Result<Option<String>, String> {
        let Some(step) = (0..self.new_ids.len()).find(|&i| ids.get(i) != Some(&self.new_ids[i])) else {
            return Ok(None);
        };
        let what = format!(
            "{}: step {step}: got {:?}, mlx-lm has {}, logit gap {}",
            self.name,
            ids.get(step),
            self.new_ids[step],
            self.gaps[step]
        );
        if self.gaps[step] < TIE_GAP && ids.get(step).is_some() { Ok(Some(what)) } else { Err(what) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_tie_excuses_a_difference() {
        let p = GoldenPrompt {
            name: "p".into(),
            messages: None,
            text: None,
            prompt_ids: vec![],
            new_ids: vec![1, 2, 3],
            gaps: vec![0.5, 0.0005, 0.5],
            text_out: String::new(),
            cache: None,
        };
        assert_eq!(p.compare(&[1, 2, 3]), Ok(None));
        assert!(p.compare(&[1, 9, 9]).unwrap().is_some());
        assert!(p.compare(&[9, 2, 3]).is_err());
        assert!(p.compare(&[1, 2]).is_err());
    }
}
