//! `pd-source`: the scripted token source. Prints one line of JSON with its two addresses.

use pd_load::source::{Voice, Worker, hello, serve_http};
use pd_load::timecode::Words;
use shared::control::{ClusterKey, serve};
use shared::model::Model;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// A scripted token source: OpenAI over HTTP, and pd-bridge's control protocol.
#[derive(clap::Parser)]
struct Args {
    /// Model whose vocabulary to use
    #[arg(long)]
    model: PathBuf,
    /// Where to serve HTTP
    #[arg(long, default_value = "127.0.0.1:0")]
    http: String,
    /// Where to serve the control protocol
    #[arg(long, default_value = "127.0.0.1:0")]
    control: String,
}

// One thread: it needs no more, and leaves the other core to what is measured.
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = <Args as clap::Parser>::parse();
    let model = Model::open(&args.model)?;
    let words = Arc::new(Words::of(&model.tokenizer)?);
    let (hello, name) = (hello(&model), Arc::from(model.spec.name.as_str()));
    drop(model);
    let (http, control) = (TcpListener::bind(&args.http).await?, TcpListener::bind(&args.control).await?);
    announce(&http, &control, &name)?;
    let worker = Arc::new(Worker::new(hello, Voice::Clock(words.clone())));
    tokio::select! {
        ended = serve(control, ClusterKey::loopback(), worker, CancellationToken::new()) => ended?,
        ended = serve_http(http, words, name) => ended?,
    }
    Ok(())
}

#[allow(clippy::print_stdout, reason = "the line that whoever started it waits for")]
fn announce(http: &TcpListener, control: &TcpListener, model: &str) -> std::io::Result<()> {
    println!(
        r#"{{"http":"{}","control":"{}","model":"{model}"}}"#,
        http.local_addr()?,
        control.local_addr()?
    );
    Ok(())
}
