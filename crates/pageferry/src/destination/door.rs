//! What one connection has to do before anybody believes it: TLS, the token, a preamble, and on a control connection a
//! first message. Each is asked for only after the one before; who fails is told why, as far as it understands us.

use super::desk::{Arrival, Arrived, DataConnection};
use crate::Security;
use crate::control::{Incoming, read_message};
use crate::security::{self, Nonce, PROOF_BYTES, Reply, Status, TOKEN_MAGIC, Token};
use crate::transport::AsyncSocket;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
use tokio::time::timeout;
use wire::{AbortCause, ConnectionRole, MAGIC, Message, Preamble, PreambleReply, frame};

/// How long a few last words may take.
const LAST_WORDS_TIMEOUT: Duration = Duration::from_millis(500);

/// The first byte of a TLS handshake.
const TLS_HANDSHAKE: u8 = 22;

/// A fatal alert of TLS 1.2 and later, in plain: "handshake failure".
const TLS_ALERT: [u8; 7] = [21, 3, 3, 0, 2, 2, 40];

const NEEDS_TLS: &str = "this receiver takes TLS only: give the source --tls-cert, --tls-key and --tls-ca";
const NEEDS_TOKEN: &str = "this receiver asks for a token: give the source --token-file, with the same content";

/// What a connection opens with, under TLS or not.
enum Opening {
    Preamble,
    Token,
}

/// Finds out who a connection is. The error is a sentence for the log.
pub(super) async fn introduce(mut socket: AsyncSocket, security: &Security) -> Result<Arrival, String> {
    let first = socket.peek().await.map_err(|e| broke(&e))?;
    let first = first.ok_or("it was closed before it said a word")?;
    let missing = match (&security.tls, first == TLS_HANDSHAKE) {
        (Some(tls), true) => {
            if let Err(why) = socket.accept_tls(tls).await {
                linger(&socket).await;
                return Err(why);
            }
            None
        }
        (None, true) => {
            socket.write_plain(&TLS_ALERT).await.map_err(|e| broke(&e))?;
            linger(&socket).await;
            return Err(
                "it speaks TLS, and this receiver was started without --tls-cert, --tls-key and --tls-ca".to_owned(),
            );
        }
        (Some(_), false) => Some(NEEDS_TLS),
        (None, false) => None,
    };
    let mut start = [0; MAGIC.len()];
    let opening = read_opening(&socket, &mut start).await?;
    match (opening, missing, &security.token) {
        (Opening::Token, Some(why), _) => refuse_token(&socket, Status::WantsTls, why).await,
        (Opening::Token, None, None) => {
            let why = "it proves a token, and this receiver was started without --token-file";
            refuse_token(&socket, Status::None, why).await
        }
        (Opening::Token, None, Some(token)) => {
            check_token(&socket, token).await?;
            match read_opening(&socket, &mut start).await? {
                Opening::Preamble => believe(socket, &start).await,
                Opening::Token => Err("it proves the token twice".to_owned()),
            }
        }
        (Opening::Preamble, Some(why), _) => refuse(&socket, &start, why).await,
        (Opening::Preamble, None, Some(_)) => refuse(&socket, &start, NEEDS_TOKEN).await,
        (Opening::Preamble, None, None) => believe(socket, &start).await,
    }
}

/// Reads the magic number that a connection begins with; what cannot become one is refused at its first wrong byte.
async fn read_opening(socket: &AsyncSocket, start: &mut [u8; MAGIC.len()]) -> Result<Opening, String> {
    let mut have = 0;
    while have < start.len() {
        match socket.read(&mut start[have..]).await {
            Ok(0) => return Err(format!("it was closed after {have} bytes")),
            Ok(n) => have += n,
            Err(error) => return Err(broke(&error)),
        }
        if start[..have] != TOKEN_MAGIC[..have] {
            wire::check_magic(&start[..have]).map_err(|e| e.to_string())?;
        }
    }
    Ok(match *start == TOKEN_MAGIC {
        true => Opening::Token,
        false => Opening::Preamble,
    })
}

/// The receiver's side of the token's handshake.
async fn check_token(socket: &AsyncSocket, token: &Token) -> Result<(), String> {
    let mut theirs: Nonce = [0; 32];
    read_all(socket, &mut theirs, "the token's first message").await?;
    let nonce = security::draw_nonce().map_err(|e| e.to_string())?;
    let status = Status::Good;
    let reply = Reply { status, nonce };
    socket.write_all(&reply.encode()).await.map_err(|e| broke(&e))?;
    let mut proof = [0; PROOF_BYTES];
    read_all(socket, &mut proof, "the token's proof").await?;
    let right = token.source_proves(&proof, &theirs, &nonce);
    let mut answer = [0; 1 + PROOF_BYTES];
    if right {
        answer[0] = Status::Good.byte();
        answer[1..].copy_from_slice(&token.receiver_proof(&theirs, &nonce));
    } else {
        answer[0] = Status::Wrong.byte();
    }
    socket.write_all(&answer).await.map_err(|e| broke(&e))?;
    if right {
        return Ok(());
    }
    linger(socket).await;
    Err("its token is another one: give both sides a --token-file with the same content".to_owned())
}

async fn refuse_token(socket: &AsyncSocket, status: Status, why: &str) -> Result<Arrival, String> {
    let reply = Reply { status, nonce: [0; 32] };
    socket.write_all(&reply.encode()).await.map_err(|e| broke(&e))?;
    linger(socket).await;
    Err(why.to_owned())
}

/// Answers a preamble, and refuses in the words of the protocol; a data connection has no words, and is dropped.
async fn refuse(socket: &AsyncSocket, start: &[u8; MAGIC.len()], why: &str) -> Result<Arrival, String> {
    let preamble = read_preamble(socket, start).await?;
    answer(socket, &preamble).await?;
    if preamble.role == ConnectionRole::Control {
        let reasons = vec![why.to_owned()];
        last_words(socket, &Message::Refuse { reasons }).await;
    }
    Err(format!("a source is refused: {why}"))
}

/// The preamble, and what a control connection says first.
async fn believe(socket: AsyncSocket, start: &[u8; MAGIC.len()]) -> Result<Arrival, String> {
    let preamble = read_preamble(&socket, start).await?;
    let version = answer(&socket, &preamble).await?;
    let session = preamble.session;
    match preamble.role {
        ConnectionRole::Data { stream } => Ok(Arrival::Data(DataConnection {
            session,
            stream,
            version,
            socket,
            since: Instant::now(),
        })),
        ConnectionRole::Control => match read_message(&socket, version, &AtomicU64::new(0)).await {
            Ok(first) => Ok(Arrival::Control(Arrived {
                session,
                version,
                socket,
                first,
            })),
            Err(Incoming::Malformed(reason)) => {
                let abort = Message::Abort {
                    reason: format!("the first message: {reason}"),
                    cause: AbortCause::Failed,
                };
                last_words(&socket, &abort).await;
                Err(format!("a source's first message: {reason}"))
            }
            Err(other) => Err(format!("a source sent no first message: {other:?}")),
        },
    }
}

/// Answers a preamble, with the version to speak.
async fn answer(socket: &AsyncSocket, preamble: &Preamble) -> Result<u16, String> {
    let reply = PreambleReply::answer(wire::VERSIONS, preamble.versions);
    let replied = socket.write_all(&reply.encode()).await;
    replied.map_err(|e| format!("answering a connection: {e}"))?;
    if reply.version == 0 {
        return Err(format!(
            "a source speaks protocol versions {}, we speak {}; upgrade the older one",
            preamble.versions, reply.ours
        ));
    }
    Ok(reply.version)
}

async fn read_preamble(socket: &AsyncSocket, start: &[u8; MAGIC.len()]) -> Result<Preamble, String> {
    let mut buffer = [0; wire::PREAMBLE_BYTES];
    let (head, rest) = buffer.split_at_mut(start.len());
    head.copy_from_slice(start);
    read_all(socket, rest, "its preamble").await?;
    Preamble::decode(&buffer).map_err(|e| e.to_string())
}

async fn read_all(socket: &AsyncSocket, into: &mut [u8], what: &str) -> Result<(), String> {
    match socket.read_full(into).await {
        Ok(n) if n == into.len() => Ok(()),
        Ok(_) => Err(format!("it was closed inside {what}")),
        Err(error) => Err(broke(&error)),
    }
}

fn broke(error: &std::io::Error) -> String {
    format!("it broke: {error}")
}

/// Sends a message before a connection is dropped, and waits a moment for the peer to have read it.
pub(super) async fn last_words(socket: &AsyncSocket, message: &Message) {
    let talk = async {
        if let Ok(bytes) = frame::encode(message)
            && socket.write_all(&bytes).await.is_ok()
        {
            drain(socket).await;
        }
    };
    if timeout(LAST_WORDS_TIMEOUT, talk).await.is_err() {
        tracing::debug!("a connection that is dropped does not close");
    }
}

/// Waits a moment for the peer to have read what was written: whoever closes a socket with something unread in it resets
/// the connection.
async fn linger(socket: &AsyncSocket) {
    if timeout(LAST_WORDS_TIMEOUT, drain(socket)).await.is_err() {
        tracing::debug!("a connection that is dropped does not close");
    }
}

async fn drain(socket: &AsyncSocket) {
    socket.end_of_writing();
    let mut rest = [0; 4096];
    while matches!(socket.read(&mut rest).await, Ok(n) if n > 0) {}
}
