//! What all endpoints that answer with a model have in common.

use super::App;
use super::answer::{Exchange, Request, answer};
use super::bridge_headers::Asked;
use super::error::ApiError;
use super::ops::check_model;
use super::params::Fields;
use super::write_clock::WriteClock;
use axum::body::Body;
use axum::http::HeaderMap;
use axum::response::Response;
use std::sync::Arc;

/// Reads a request by `read`, the only thing in which such endpoints differ, and answers it.
pub(super) async fn respond(
    app: Arc<App>,
    clock: WriteClock,
    headers: HeaderMap,
    body: Body,
    read: fn(&App, &Fields) -> Result<Request, ApiError>,
) -> Response {
    let exchange = Exchange::new(&headers, clock);
    let answered = async {
        let asked = Asked::read(&headers)?;
        let fields = fields(&app, body).await?;
        let request = read(&app, &fields)?;
        Box::pin(answer(&app, &exchange, asked, request)).await
    };
    match answered.await {
        Ok(response) => response,
        Err(error) => exchange.refuse(&app, error),
    }
}

/// The fields of a request for the model that is served here.
///
/// # Errors
/// As [`super::bodies::Bodies::read`]; 400 when the body is no JSON object, 404 when it names another model.
pub(super) async fn fields(app: &App, body: Body) -> Result<Fields, ApiError> {
    let fields = Fields::parse(app.bodies.read(body).await?)?;
    check_model(app, &fields)?;
    Ok(fields)
}
