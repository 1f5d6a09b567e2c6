//! The two doors of the source.

mod http;
mod worker;

pub use http::serve_http;
pub use worker::{Voice, Worker, hello, series};
