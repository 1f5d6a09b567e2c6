//! From constraints to matchers.

use super::recent::Recent;
use super::vocabulary::Vocabulary;
use super::{ConstraintError, Matcher, grammar};
use llguidance::ParserFactory;
use llguidance::api::{ParserLimits, StopReason, TopLevelGrammar};
use parking_lot::{Condvar, Mutex};
use shared::control::Constraint;
use shared::tokenizer::Tokenizer;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};
use toktrie::TokEnv;

/// Longest time for one constraint, waiting for others included.
const MAX_COMPILE: Duration = Duration::from_secs(5);
/// Compilations at once, those included that nobody waits for any more.
const MAX_AT_ONCE: usize = 4;
/// Grammars are compiled recursively.
const STACK_BYTES: usize = 64 << 20;
/// Longest error text.
const MAX_MESSAGE_BYTES: usize = 500;

/// Compiles constraints for one model. Clones share everything.
#[derive(Clone)]
pub struct Compiler {
    shared: Arc<Shared>,
}

struct Shared {
    factory: ParserFactory,
    end_tokens: Arc<[u32]>,
    running: Mutex<usize>,
    ended: Condvar,
    recent: Recent,
}

impl Compiler {
    /// For a model with `vocab_size` logits whose answers end with one of `end_tokens`. Takes a while: the vocabulary
    /// becomes a trie.
    ///
    /// # Errors
    /// [`ConstraintError::Vocabulary`] when no token ends an answer or the trie cannot hold the vocabulary.
    pub fn new(
        tokenizer: &Tokenizer,
        vocab_size: usize,
        end_tokens: &[u32],
    ) -> Result<Self, ConstraintError> {
        let vocabulary: TokEnv = Arc::new(Vocabulary::new(tokenizer, vocab_size, end_tokens)?);
        let mut factory = ParserFactory::new_simple(&vocabulary)
            .map_err(|e| ConstraintError::Vocabulary(first_line(&e)))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        let shared = Shared {
            end_tokens: vocabulary.tok_trie().eos_tokens().into(),
            factory,
            running: Mutex::new(0),
            ended: Condvar::new(),
            recent: Recent::default(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// A matcher at the start of an answer. Blocks for as long as compiling takes, seconds at most.
    ///
    /// # Errors
    /// [`ConstraintError`] for what is too large, invalid, unsupported or takes too long.
    pub fn compile(&self, constraint: &Constraint) -> Result<Matcher, ConstraintError> {
        if let Some(matcher) = self.shared.recent.take(constraint) {
            return Ok(matcher);
        }
        let matcher = self.compile_anew(constraint)?;
        self.shared.recent.put(constraint, &matcher);
        Ok(matcher)
    }

    fn compile_anew(&self, constraint: &Constraint) -> Result<Matcher, ConstraintError> {
        let kind = grammar::kind(constraint);
        let grammar = grammar::grammar(constraint)?;
        let too_slow = || ConstraintError::TooSlow { kind, limit: MAX_COMPILE };
        let deadline = Instant::now() + MAX_COMPILE;
        let slot = self.slot(deadline).ok_or_else(too_slow)?;
        let (sender, receiver) = mpsc::sync_channel(1);
        let shared = self.shared.clone();
        let body = move || {
            let _slot = slot;
            let done = begin(&shared.factory, grammar).map_err(|e| first_line(&e));
            // Nobody waits any more after the time is up.
            let _ = sender.send(done);
        };
        let invalid = |message| ConstraintError::Invalid { kind, message };
        std::thread::Builder::new()
            .name("constraint".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(body)
            .map_err(|e| invalid(e.to_string()))?;
        match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Ok(matcher)) => Ok(Matcher::new(matcher, self.shared.end_tokens.clone())),
            Ok(Err(message)) => Err(invalid(message)),
            Err(RecvTimeoutError::Timeout) => Err(too_slow()),
            Err(RecvTimeoutError::Disconnected) => Err(invalid("the compiler failed".to_owned())),
        }
    }

    fn slot(&self, deadline: Instant) -> Option<Slot> {
        let mut running = self.shared.running.lock();
        while *running >= MAX_AT_ONCE {
            if self.shared.ended.wait_until(&mut running, deadline).timed_out() {
                return None;
            }
        }
        *running += 1;
        Some(Slot(self.shared.clone()))
    }
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiler").finish_non_exhaustive()
    }
}

/// Compiles and takes the first step: what cannot even be begun is found out here, not between two tokens.
fn begin(factory: &ParserFactory, grammar: TopLevelGrammar) -> anyhow::Result<llguidance::Matcher> {
    let mut matcher = llguidance::Matcher::new(Ok(factory.create_parser(grammar)?));
    if !matcher.is_stopped() {
        matcher.compute_mask()?;
    }
    Ok(matcher)
}

/// A place among the compilations.
struct Slot(Arc<Shared>);

impl Drop for Slot {
    fn drop(&mut self) {
        *self.0.running.lock() -= 1;
        self.0.ended.notify_one();
    }
}

/// The library's own limits, with less memory for a lexer's states (1 to 2 KB each), and errors without a dump.
fn limits() -> ParserLimits {
    ParserLimits { max_lexer_states: 50_000, verbose_errors: false, ..ParserLimits::default() }
}

/// What a client can use of a library's error.
pub(super) fn first_line(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    let text = text.split("\n<").next().unwrap_or_default().trim();
    if text == StopReason::NoExtensionBias.to_string() {
        return "nothing can satisfy it".to_owned();
    }
    let text = text.strip_prefix("panic: ").unwrap_or(text);
    let end = text.floor_char_boundary(MAX_MESSAGE_BYTES);
    text[..end].to_owned()
}
