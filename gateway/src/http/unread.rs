//! A connection on which a request was answered before its body was read can carry no other request, and is closed.
//! Clients that keep connections are told so, or their next request would run into the closed one.

use axum::http::{HeaderValue, Request, Response, header};
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

/// A body that notes when it was read to its end.
pub(super) struct Watched<B> {
    body: B,
    read: Option<Arc<AtomicBool>>,
}

/// What became of a request's body; `None` where there is none.
pub(super) struct Unread(Option<Arc<AtomicBool>>);

/// Watches the body of a request.
pub(super) fn watch<B: Body>(request: Request<B>) -> (Request<Watched<B>>, Unread) {
    let read = (!request.body().is_end_stream()).then(Arc::default);
    let unread = Unread(read.clone());
    (request.map(|body| Watched { body, read }), unread)
}

impl Unread {
    /// Says in the answer that the connection ends with it, if it must.
    pub(super) fn tell<B>(&self, response: &mut Response<B>) {
        if self.0.as_ref().is_some_and(|read| !read.load(Ordering::Acquire)) {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Watched<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(last) = &frame
            && (last.is_none() || self.body.is_end_stream())
            && let Some(read) = &self.read
        {
            read.store(true, Ordering::Release);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::{BodyExt as _, Full};

    #[tokio::test]
    async fn only_a_body_left_unread_ends_the_connection() {
        let closes = |unread: &Unread| {
            let mut response = Response::new(());
            unread.tell(&mut response);
            response.headers().contains_key(header::CONNECTION)
        };
        let (request, unread) = watch(Request::new(Full::new(Bytes::from_static(b"{}"))));
        assert!(closes(&unread));
        assert_eq!(request.into_body().collect().await.unwrap().to_bytes(), "{}");
        assert!(!closes(&unread));
        let (_, unread) = watch(Request::new(Full::new(Bytes::new())));
        assert!(!closes(&unread));
    }
}
