//! What every engine takes for granted.

use super::{ModelSpec, RopeScaling, SpecError};

/// Largest dimension that is believed; products of three stay far from overflow.
const MAX_DIMENSION: usize = 1 << 20;
const MAX_VOCAB: usize = 1 << 24;
const MAX_LAYERS: usize = 1 << 12;

impl ModelSpec {
    /// Refuse sizes and constants that no real model has.
    pub(super) fn checked(self) -> Result<Self, SpecError> {
        let sizes = [
            ("num_hidden_layers", self.n_layers, MAX_LAYERS),
            ("hidden_size", self.hidden, MAX_DIMENSION),
            ("num_attention_heads", self.n_heads, MAX_DIMENSION),
            ("num_key_value_heads", self.n_kv_heads, MAX_DIMENSION),
            ("head_dim", self.head_dim, MAX_DIMENSION),
            ("intermediate_size", self.intermediate, MAX_DIMENSION),
            ("vocab_size", self.vocab_size, MAX_VOCAB),
            ("max_position_embeddings", self.max_positions, u32::MAX as usize),
        ];
        for (key, value, most) in sizes {
            if value == 0 || value > most {
                return Err(invalid(key, format!("{value} is not within 1..={most}")));
            }
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Err(invalid("num_key_value_heads", "does not divide num_attention_heads"));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(invalid("head_dim", "is odd, and rotary embedding needs pairs"));
        }
        for (key, value) in [("rms_norm_eps", self.rms_norm_eps), ("rope_theta", self.rope.theta)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(invalid(key, format!("{value} is not a positive number")));
            }
        }
        let scaling_is_sound = match self.rope.scaling {
            RopeScaling::None => true,
            RopeScaling::Linear { factor } => factor.is_finite() && factor > 0.0,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
                [factor, low_freq_factor, high_freq_factor].iter().all(|f| f.is_finite() && *f > 0.0)
                    && high_freq_factor > low_freq_factor
                    && original_max_positions > 0
            }
        };
        if !scaling_is_sound {
            return Err(invalid("rope_scaling", format!("{:?} makes no sense", self.rope.scaling)));
        }
        Ok(self)
    }
}

pub(super) fn invalid(key: &str, reason: impl Into<String>) -> SpecError {
    SpecError::Invalid { key: key.to_owned(), reason: reason.into() }
}
