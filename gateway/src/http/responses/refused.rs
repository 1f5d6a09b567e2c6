//! Fields that need a memory, or something that is not here.

use crate::http::error::ApiError;
use crate::http::params::Fields;

/// Refuses them.
///
/// # Errors
/// 400 naming the parameter.
pub(super) fn check(f: &Fields) -> Result<(), ApiError> {
    const MEMORY: &str = "nothing is stored here: send the whole conversation in `input`";
    for name in ["previous_response_id", "conversation"] {
        f.refuse(name, |_| false, MEMORY)?;
    }
    f.refuse("prompt", |_| false, "no prompts are stored here: send the text in `input`")?;
    f.refuse("background", |v| v == false, "answers are not kept for later")?;
    f.refuse("truncation", |v| v == "disabled", "a conversation is never cut")?;
    f.refuse("max_tool_calls", |_| false, "only the client calls tools here")?;
    f.refuse("context_management", |_| false, "a conversation is never cut")
}
