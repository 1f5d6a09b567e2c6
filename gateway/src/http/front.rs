//! The way of a request into the house: a short one for inference, the router's for everything else.
//!
//! Every layer of a router costs an inference request allocations and copies of itself; here the same checks are plain
//! calls in the same order.

use super::bridge_headers::with_verdict;
use super::write_clock::WriteClock;
use super::{App, auth, chat, completions, head_limit, journal, responses, router};
use axum::body::Body;
use axum::extract::State;
use axum::http::{Method, Request};
use axum::response::{IntoResponse as _, Response};
use axum::{Extension, Router};
use bytes::Bytes;
use std::sync::Arc;
use tower::ServiceExt as _;

/// All that answers requests.
pub(super) struct Front {
    app: Arc<App>,
    router: Router,
}

/// An endpoint that is worth a short way.
#[derive(Debug, Clone, Copy)]
enum Inference {
    Chat,
    Completions,
    Responses,
}

impl Front {
    pub(super) fn new(app: Arc<App>) -> Self {
        let router = router(app.clone());
        Self { app, router }
    }

    /// Answers a request; `clock` is its connection's.
    pub(super) async fn answer<B>(&self, mut request: Request<B>, clock: WriteClock) -> Response
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<axum::BoxError>,
    {
        // What browsers of other origins may do is the router's business.
        match Inference::of(&request).filter(|_| self.app.settings.cors.is_none()) {
            Some(endpoint) => self.infer(endpoint, request, clock).await,
            None => {
                request.extensions_mut().insert(clock);
                let Ok(response) = self.router.clone().oneshot(request.map(Body::new)).await;
                response
            }
        }
    }

    async fn infer<B>(&self, endpoint: Inference, request: Request<B>, clock: WriteClock) -> Response
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<axum::BoxError>,
    {
        let app = &self.app;
        journal::kept(app, request, async |request: Request<B>| {
            let admitted = head_limit::within(app, &request)
                .and_then(|()| auth::admit(app, request.method(), request.headers()));
            let (parts, body) = request.into_parts();
            let (app, clock, body) = (State(app.clone()), Extension(clock), Body::new(body));
            with_verdict(match (admitted, endpoint) {
                (Err(error), _) => error.into_response(),
                (Ok(()), Inference::Chat) => chat::create(app, clock, parts.headers, body).await,
                (Ok(()), Inference::Completions) => {
                    completions::create(app, clock, parts.headers, body).await
                }
                (Ok(()), Inference::Responses) => responses::create(app, clock, parts.headers, body).await,
            })
        })
        .await
    }
}

impl Inference {
    fn of<B>(request: &Request<B>) -> Option<Self> {
        if request.method() != Method::POST {
            return None;
        }
        match request.uri().path() {
            "/v1/chat/completions" => Some(Self::Chat),
            "/v1/completions" => Some(Self::Completions),
            "/v1/responses" => Some(Self::Responses),
            _ => None,
        }
    }
}
