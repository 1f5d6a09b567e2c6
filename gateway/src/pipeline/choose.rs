//! Choosing the workers of one try.

use super::FailureKind;
use super::attempt::{Attempt, Stop};
use super::guard::DecodeGuard;
use crate::fleet::{Candidate, DecodeLink, Pairing, PrefillLink};
use crate::planner::{Plan, Ranked, Wanted, rank};
use shared::control::{DecodeEvent, EventStream, Require, WorkerErrorCode};
use shared::keys::{BlockKey, tokens_digest};
use std::sync::Arc;

/// Decoders that are asked for one request before it takes what it gets.
const MAX_ASKED: usize = 3;
/// Prompts that begin with the same so many tokens are at home on the same decoder.
const PREFIX_TOKENS: usize = 256;

/// A prefill worker and what is known of it together with the decoder.
pub(super) type Peer = (Arc<PrefillLink>, Arc<Pairing>);

/// A decoder that has the prompt, and the plan that follows from what it holds.
pub(super) struct Chosen {
    pub(super) decoder: Arc<DecodeLink>,
    pub(super) guard: DecodeGuard,
    pub(super) max_new_tokens: u32,
    /// Requests ahead on the decoder.
    pub(super) queue: u32,
    /// Keys of the prompt's full blocks on this decoder.
    pub(super) keys: Arc<[BlockKey]>,
    pub(super) peer: Option<Peer>,
    pub(super) plan: Plan,
    /// The answer, if it was asked for already.
    pub(super) events: Option<Events>,
}

/// What a decoder sends.
type Events = EventStream<DecodeEvent>;

impl Attempt<'_> {
    /// Asks the decoder that looks best what it holds of the prompt, and takes it unless its answer makes another
    /// look better.
    pub(super) async fn choose(&mut self) -> Result<Chosen, Stop> {
        let (ctx, job) = (self.ctx, self.job);
        if self.retry && job.require != Require::Nothing {
            // The worker that was lost may be the prefill worker, and the client can't do without.
            ctx.fleet.bridge_within(ctx.reconnect_wait).await;
        }
        let mut candidates = ctx.fleet.candidates_within(&job.tokens, ctx.reconnect_wait).await;
        let wanted = self.wanted();
        let mut refused = Stop::Failed(FailureKind::NoDecodeWorker);
        let mut asked = 0;
        while let Some(best) = best_of(&wanted, &candidates) {
            let decoder = candidates[best.decoder].decoder.clone();
            self.parties.decode = Some(decoder.hello.node.clone());
            let max_new_tokens = match self.check_size(&decoder) {
                Ok(room) => room,
                Err(kind) => {
                    refused = kind.into();
                    candidates.swap_remove(best.decoder);
                    continue;
                }
            };
            let guard = DecodeGuard::new(&decoder, &self.worker_id, self.prompt_tokens);
            let answered =
                match self.prepare_or_more(&wanted, &candidates, best.decoder, max_new_tokens).await {
                    Ok((answer, events)) => self.prepared(&decoder, answer).await.map(|told| (told, events)),
                    Err(stop) => Err(stop),
                };
            let ((resident_tokens, queue), events) = match answered {
                Ok(prepared) => prepared,
                Err(stop) if is_its_own(&stop) => {
                    refused = stop;
                    candidates.swap_remove(best.decoder);
                    continue;
                }
                Err(stop) => return Err(stop),
            };
            asked += 1;
            candidates[best.decoder].holds(resident_tokens);
            let now = rank(&wanted, std::slice::from_ref(&candidates[best.decoder].outlook));
            let moved = best_of(&wanted, &candidates).is_some_and(|b| b.decoder != best.decoder);
            if moved && asked < MAX_ASKED {
                tracing::debug!(decode = %decoder.hello.node, resident_tokens, "asking another decoder");
                continue;
            }
            let Candidate { keys, mut peers, .. } = candidates.swap_remove(best.decoder);
            let Some(Ranked { peer, plan, .. }) = now.first().copied() else { break };
            let peer = peer.map(|i| peers.swap_remove(i));
            return Ok(Chosen { decoder, guard, max_new_tokens, queue, keys, peer, plan, events });
        }
        Err(refused)
    }

    /// Announces the prompt to a decoder; asks for the answer in the same breath where the plan is certain.
    async fn prepare_or_more(
        &mut self,
        wanted: &Wanted,
        candidates: &[Candidate],
        at: usize,
        max_new_tokens: u32,
    ) -> Result<(Events, Option<Events>), Stop> {
        let decoder = &candidates[at].decoder;
        let answer = self.prepare(decoder).await?;
        // A constraint is compiled before `prepare` is answered, and only then can the answer begin.
        let is_certain = candidates.len() == 1
            && self.job.spec.constraint.is_none()
            && wanted.is_alone_for_certain(!candidates[at].peers.is_empty());
        let events =
            if is_certain { Some(self.generate(decoder, max_new_tokens, None).await?) } else { None };
        Ok((answer, events))
    }

    fn wanted(&self) -> Wanted {
        let tokens = &self.job.tokens;
        let digest = tokens_digest(&tokens[..tokens.len().min(PREFIX_TOKENS)]);
        let (words, _) = digest.as_chunks::<8>();
        Wanted {
            prompt_tokens: self.prompt_tokens,
            prefix: u64::from_le_bytes(words[0]),
            route: self.job.route,
            require: self.job.require,
            min_bridge_tokens: self.ctx.min_bridge_tokens,
        }
    }
}

fn best_of(wanted: &Wanted, candidates: &[Candidate]) -> Option<Ranked> {
    let outlooks: Vec<_> = candidates.iter().map(|c| c.outlook.clone()).collect();
    rank(wanted, &outlooks).into_iter().next()
}

/// Whether a refusal is of that decoder only, so that another may take the request.
fn is_its_own(stop: &Stop) -> bool {
    match stop {
        Stop::Lost(_) => true,
        Stop::Failed(FailureKind::Worker(error)) => {
            matches!(error.code, WorkerErrorCode::Busy | WorkerErrorCode::TooLong | WorkerErrorCode::Engine)
        }
        Stop::Failed(_) => false,
    }
}
