//! Workers that follow a script on the real wire.

mod decode;
mod prefill;
mod relay;

pub use decode::{FakeDecode, Step};
pub use prefill::{FakePrefill, Play};
pub use relay::{Act, Meddle, Seen};

use shared::angles::SinCos;
use shared::control::{
    CacheIdentity, ClusterKey, Handler, Hello, KvRecipe, PROTOCOL_VERSION, Rates, Role, RopeRecipe, serve,
};
use shared::hexbytes::Hex;
use shared::layout::{CacheLayout, Dtype, LayerCache};
use shared::model::Model;
use std::path::Path;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// A fake worker's server; it ends with this value.
pub struct Server {
    /// Control address.
    pub addr: String,
    shutdown: CancellationToken,
}

impl Server {
    /// Serves a handler at an address.
    pub async fn start<H: Handler>(addr: &str, handler: Arc<H>) -> Self {
        let listener = TcpListener::bind(addr).await.unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let shutdown = CancellationToken::new();
        tokio::spawn(serve(listener, ClusterKey::loopback(), handler, shutdown.clone()));
        Self { addr, shutdown }
    }

    /// Closes the port and every connection.
    pub fn stop(&self) {
        self.shutdown.cancel();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The hello of a worker that holds `model`.
fn hello(model: &Path, role: Role, cache: Option<CacheIdentity>) -> Hello {
    let model = Model::open(model).unwrap();
    Hello {
        protocol: PROTOCOL_VERSION,
        role,
        node: format!("fake-{role:?}").to_lowercase(),
        version: "0".to_owned(),
        engine: "script".to_owned(),
        model: model.spec.name.clone(),
        tokenizer_digest: Hex(model.digests().tokenizer),
        vocab_size: u32::try_from(model.spec.vocab_size).unwrap(),
        max_tokens: u32::try_from(model.spec.max_positions).unwrap(),
        capacity_tokens: 0,
        rates: Rates::default(),
        cache,
    }
}

/// A cache identity that no real worker has.
fn invented_cache(n_layers: usize, bulk_addr: &str) -> CacheIdentity {
    let layer = LayerCache::Full { n_kv_heads: 2, head_dim: 16, dtype: Dtype::F32 };
    CacheIdentity {
        fingerprint: Hex([9; 32]),
        layout: CacheLayout::uniform(n_layers, layer, 16),
        recipe: KvRecipe {
            rope: RopeRecipe { inv_freq: vec![1.0; 8], sin_cos: SinCos::default() },
            projection_digests: vec![Hex([0; 32]); n_layers],
            summation_runs: vec![],
        },
        bulk_addr: bulk_addr.to_owned(),
    }
}
