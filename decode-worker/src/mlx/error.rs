//! What can go wrong inside the MLX engine.

use shared::weights::WeightsError;

/// Failures of the MLX engine.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum MlxError {
    /// MLX refused or failed an operation; the text is MLX's own.
    #[error("MLX: {0}")]
    Mlx(String),
    /// A weight could not be read.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A weight has fewer or more numbers, or rows, than its shape or the model asks for.
    #[error("tensor {tensor} holds {found} elements or rows, {expected} are needed")]
    TensorSize {
        /// Canonical name.
        tensor: String,
        /// Elements that are there.
        found: usize,
        /// Elements that are needed.
        expected: usize,
    },
    /// A size exceeds what MLX can index.
    #[error("{what} = {value} is more than MLX can index")]
    TooLarge {
        /// What was measured.
        what: &'static str,
        /// Its size.
        value: usize,
    },
    /// No tokens were given to a forward pass, or no blocks to an import.
    #[error("nothing to compute: {0} is empty")]
    Empty(&'static str),
    /// A token id lies outside the vocabulary.
    #[error("token id {token} is outside the vocabulary of {vocab_size}")]
    Token {
        /// The id.
        token: u32,
        /// Rows of the embedding table.
        vocab_size: usize,
    },
    /// Imported bytes do not have the size that the cache layout implies.
    #[error("imported block {block}: {what} is {found}, the cache layout needs {expected}")]
    Block {
        /// Index of the block in the import.
        block: usize,
        /// What was measured.
        what: &'static str,
        /// What was found.
        found: usize,
        /// What the layout needs.
        expected: usize,
    },
    /// A token range outside the sequence was asked for.
    #[error("tokens {start}..{end} are not within a sequence of {len}")]
    Range {
        /// First token.
        start: usize,
        /// One past the last token.
        end: usize,
        /// Tokens in the sequence.
        len: usize,
    },
}

impl From<mlx_rs::error::Exception> for MlxError {
    fn from(error: mlx_rs::error::Exception) -> Self {
        Self::Mlx(error.what().to_owned())
    }
}

impl From<mlx_rs::error::AsSliceError> for MlxError {
    fn from(error: mlx_rs::error::AsSliceError) -> Self {
        Self::Mlx(error.to_string())
    }
}
