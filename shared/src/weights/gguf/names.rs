//! llama.cpp's tensor names under Hugging Face's.

/// What a GGUF tensor is to a llama model.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// A weight under its canonical name. Query and key rows come in interleaved rotary order.
    Weight { name: String, interleaved: bool },
    /// Frequency factors of the rotary embedding: part of the specification, not a weight.
    RopeFactors,
    /// Nothing known.
    Unknown,
}

/// Name of the tensor of rotary frequency factors.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";

pub(super) fn role(name: &str) -> Role {
    let plain = |name: String| Role::Weight { name, interleaved: false };
    match name {
        "token_embd.weight" => return plain("model.embed_tokens.weight".to_owned()),
        "output_norm.weight" => return plain("model.norm.weight".to_owned()),
        "output.weight" => return plain("lm_head.weight".to_owned()),
        ROPE_FACTORS => return Role::RopeFactors,
        _ => {}
    }
    let Some((layer, rest)) = name.strip_prefix("blk.").and_then(|n| n.split_once('.')) else {
        return Role::Unknown;
    };
    // The number is rewritten, so "007" would alias "7".
    let Some(layer) = layer.parse::<u32>().ok().filter(|n| n.to_string() == layer) else {
        return Role::Unknown;
    };
    let Some((module, kind)) = rest.rsplit_once('.') else {
        return Role::Unknown;
    };
    let module = match (module, kind) {
        ("attn_q", "weight" | "bias") => "self_attn.q_proj",
        ("attn_k", "weight" | "bias") => "self_attn.k_proj",
        ("attn_v", "weight" | "bias") => "self_attn.v_proj",
        ("attn_output", "weight" | "bias") => "self_attn.o_proj",
        ("ffn_gate", "weight" | "bias") => "mlp.gate_proj",
        ("ffn_up", "weight" | "bias") => "mlp.up_proj",
        ("ffn_down", "weight" | "bias") => "mlp.down_proj",
        ("attn_norm", "weight") => "input_layernorm",
        ("ffn_norm", "weight") => "post_attention_layernorm",
        _ => return Role::Unknown,
    };
    Role::Weight {
        name: format!("model.layers.{layer}.{module}.{kind}"),
        interleaved: module.ends_with("q_proj") || module.ends_with("k_proj"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_map() {
        assert_eq!(
            role("blk.12.attn_k.bias"),
            Role::Weight { name: "model.layers.12.self_attn.k_proj.bias".into(), interleaved: true }
        );
        assert_eq!(
            role("blk.0.ffn_norm.weight"),
            Role::Weight {
                name: "model.layers.0.post_attention_layernorm.weight".into(),
                interleaved: false
            }
        );
        assert_eq!(role("rope_freqs.weight"), Role::RopeFactors);
        for unknown in
            ["blk.00.attn_q.weight", "blk.0.attn_qkv.weight", "blk.0.ffn_norm.bias", "output.bias", "blk.x"]
        {
            assert_eq!(role(unknown), Role::Unknown, "{unknown}");
        }
    }
}
