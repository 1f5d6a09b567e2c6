//! What the receiver says during a transfer: credits, then a receipt, or an abort at any time.

use shared::hexbytes::Hex;
use shared::transport::{FrameReceiver as _, TcpFrameReceiver};
use shared::wire::{Abort, AbortCode, FrameHeader, FrameKind, TransferReceipt, parse_credit};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

/// Messages of the receiver that may wait to be looked at.
const BACKLOG: usize = 64;

/// The receiving direction, read by its own task because reading a frame cannot be interrupted.
pub(super) struct Inbound {
    messages: mpsc::Receiver<Message>,
    credit_bytes: u64,
    end: Option<Abort>,
    _reader: AbortOnDropHandle<()>,
}

enum Message {
    Credit(u64),
    Receipt(TransferReceipt),
    End(Abort),
}

impl Inbound {
    pub(super) fn listen(id: Hex<16>, rx: TcpFrameReceiver) -> Self {
        let (tx, messages) = mpsc::channel(BACKLOG);
        let reader = AbortOnDropHandle::new(tokio::spawn(read(id, rx, tx)));
        Self { messages, credit_bytes: 0, end: None, _reader: reader }
    }

    /// Waits for any credit.
    pub(super) async fn first_credit(&mut self) -> Result<(), Abort> {
        while self.credit_bytes == 0 {
            self.next().await?;
        }
        Ok(())
    }

    /// Takes credit for a payload, waiting for more as needed.
    pub(super) async fn take_credit(&mut self, bytes: usize) -> Result<(), Abort> {
        // What is there already is looked at first, so that an abort is noticed however much credit is left.
        while let Ok(message) = self.messages.try_recv() {
            self.take(message)?;
        }
        let bytes = bytes as u64;
        while self.credit_bytes < bytes {
            self.next().await?;
        }
        self.credit_bytes -= bytes;
        Ok(())
    }

    /// Waits for the receipt.
    pub(super) async fn receipt(&mut self) -> Result<TransferReceipt, Abort> {
        loop {
            if let Some(receipt) = self.next().await? {
                return Ok(receipt);
            }
        }
    }

    /// Resolves when the receiver ends the transfer.
    pub(super) async fn ended(&mut self) -> Abort {
        loop {
            match self.next().await {
                Ok(None) => {}
                Ok(Some(_)) => {
                    return Abort::new(AbortCode::ProtocolError, "a receipt came before the commit");
                }
                Err(abort) => return abort,
            }
        }
    }

    async fn next(&mut self) -> Result<Option<TransferReceipt>, Abort> {
        if let Some(end) = &self.end {
            return Err(end.clone());
        }
        match self.messages.recv().await {
            Some(message) => self.take(message),
            None => Err(Abort::new(AbortCode::ConnectionLost, "the receiver closed the connection")),
        }
    }

    fn take(&mut self, message: Message) -> Result<Option<TransferReceipt>, Abort> {
        match message {
            Message::Credit(bytes) => {
                self.credit_bytes = self.credit_bytes.saturating_add(bytes);
                Ok(None)
            }
            Message::Receipt(receipt) => Ok(Some(receipt)),
            Message::End(abort) => {
                self.end = Some(abort.clone());
                Err(abort)
            }
        }
    }
}

async fn read(id: Hex<16>, mut rx: TcpFrameReceiver, messages: mpsc::Sender<Message>) {
    loop {
        let message = next_message(id, &mut rx).await.unwrap_or_else(Message::End);
        let last = matches!(message, Message::End(_));
        if messages.send(message).await.is_err() || last {
            return;
        }
    }
}

async fn next_message(id: Hex<16>, rx: &mut TcpFrameReceiver) -> Result<Message, Abort> {
    let protocol = |text: String| Abort::new(AbortCode::ProtocolError, text);
    let lost = |text: String| Abort::new(AbortCode::ConnectionLost, text);
    let header = rx.header().await.map_err(|e| lost(e.to_string()))?;
    let header = header.ok_or_else(|| lost("the receiver closed the connection".into()))?;
    let body = read_body(rx, &header).await?;
    // An abort may come from a receiver that could not read which transfer was meant.
    if header.transfer_id != id && header.kind != FrameKind::Abort {
        return Err(protocol("a frame of another transfer".into()));
    }
    let bad = |e: serde_json::Error| protocol(format!("{:?} frame: {e}", header.kind));
    match header.kind {
        FrameKind::Credit => {
            parse_credit(&body).map(Message::Credit).ok_or_else(|| protocol("bad credit".into()))
        }
        FrameKind::Receipt => serde_json::from_slice(&body).map(Message::Receipt).map_err(bad),
        FrameKind::Abort => Err(serde_json::from_slice(&body).map_err(bad)?),
        other => Err(protocol(format!("{other:?} is not for a sender"))),
    }
}

async fn read_body(rx: &mut TcpFrameReceiver, header: &FrameHeader) -> Result<Vec<u8>, Abort> {
    let length = header.check_body().map_err(|e| Abort::new(AbortCode::ProtocolError, e.to_string()))?;
    let mut body = vec![0; length];
    rx.payload(header, &mut body).await.map_err(|e| Abort::new(AbortCode::ConnectionLost, e.to_string()))?;
    Ok(body)
}
