//! A secret that both sides know, proven without crossing.
//!
//! | from | bytes |
//! |---|---|
//! | source | magic `PGTOKEN\n`, nonce of 32 |
//! | receiver | magic, status, nonce of 32 |
//! | source | proof of 32 |
//! | receiver | status, proof of 32 |
//!
//! A proof is the HMAC-SHA256, keyed by the token, over a label of the side that proves and both nonces. The source proves
//! first: who only connects learns nothing to try tokens on. On a link that is not encrypted it tells who opened the
//! connection, and not who writes to it afterwards.

use crate::Error;
use aws_lc_rs::hmac;
use std::fmt;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

/// What a connection begins with that proves a token.
pub(crate) const TOKEN_MAGIC: [u8; 8] = *b"PGTOKEN\n";

/// Bytes of a proof.
pub(crate) const PROOF_BYTES: usize = 32;

/// Bytes of a receiver's first answer.
pub(crate) const REPLY_BYTES: usize = 8 + 1 + 32;

/// The fewest bytes of a token: fewer could be found by trying.
const MIN_BYTES: usize = 16;

/// The most.
const MAX_BYTES: usize = 4096;

/// A side's random number.
pub(crate) type Nonce = [u8; 32];

/// A token. Never printed; written in hexadecimal for a host that is told over its control socket.
#[derive(Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Token(Arc<[u8]>);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

impl From<Token> for String {
    fn from(token: Token) -> String {
        token.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl TryFrom<String> for Token {
    type Error = String;

    fn try_from(hex: String) -> Result<Self, String> {
        let byte = |pair: &[u8]| {
            let text = std::str::from_utf8(pair).ok()?;
            u8::from_str_radix(text, 16).ok()
        };
        let bytes: Option<Vec<u8>> = hex.as_bytes().chunks(2).map(byte).collect();
        let bytes = bytes.ok_or("a token is written in hexadecimal here, two digits a byte")?;
        Token::of(&bytes).map_err(|e| format!("it {e}"))
    }
}

impl Token {
    /// From a file that nobody else may read. One newline at its end (`\n` or `\r\n`) is none of the token's.
    ///
    /// # Errors
    /// [`Error::Options`] names the file, and what to do about it.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let shown = path.display();
        let wrong = |why: String| Error::Options(format!("--token-file {shown} {why}"));
        let failed = |e: std::io::Error| wrong(format!("cannot be read: {e}"));
        let file = std::fs::File::open(path).map_err(failed)?;
        // Of the open file: what lies at the path may be another one by now.
        let mode = file.metadata().map_err(failed)?.mode();
        if mode & 0o077 != 0 {
            return Err(wrong(format!(
                "may be read or changed by others (its mode is {:03o}): run chmod 600 on it, and make a new token if they \
                 could have",
                mode & 0o777
            )));
        }
        let mut bytes = Vec::new();
        let most = (MAX_BYTES + 3) as u64;
        file.take(most).read_to_end(&mut bytes).map_err(failed)?;
        Token::new(&bytes).map_err(|e| wrong(e.to_string()))
    }

    /// From bytes, of which one newline at the end is left out.
    ///
    /// # Errors
    /// [`Error::Options`]: too few or too many.
    pub fn new(bytes: &[u8]) -> Result<Self, Error> {
        let line = bytes.strip_suffix(b"\n");
        Token::of(line.map_or(bytes, |line| line.strip_suffix(b"\r").unwrap_or(line)))
    }

    fn of(bytes: &[u8]) -> Result<Self, Error> {
        if (MIN_BYTES..=MAX_BYTES).contains(&bytes.len()) {
            return Ok(Token(bytes.into()));
        }
        let many = match bytes.len() {
            n if n > MAX_BYTES => format!("more than {MAX_BYTES} bytes"),
            n => format!("{n} bytes"),
        };
        Err(Error::Options(format!(
            "has a token of {many}: give {MIN_BYTES} to {MAX_BYTES}, as from: openssl rand -hex 32"
        )))
    }

    /// The source's proof.
    pub(crate) fn source_proof(&self, source: &Nonce, receiver: &Nonce) -> [u8; PROOF_BYTES] {
        self.prove(b"pageferry source\n", source, receiver)
    }

    /// The receiver's proof.
    pub(crate) fn receiver_proof(&self, source: &Nonce, receiver: &Nonce) -> [u8; PROOF_BYTES] {
        self.prove(b"pageferry receiver\n", source, receiver)
    }

    /// Whether the source's proof is right; takes as long for a wrong one as for another.
    pub(crate) fn source_proves(&self, proof: &[u8], source: &Nonce, receiver: &Nonce) -> bool {
        self.proves(b"pageferry source\n", proof, source, receiver)
    }

    /// Whether the receiver's proof is right.
    pub(crate) fn receiver_proves(&self, proof: &[u8], source: &Nonce, receiver: &Nonce) -> bool {
        self.proves(b"pageferry receiver\n", proof, source, receiver)
    }

    fn prove(&self, label: &[u8], source: &Nonce, receiver: &Nonce) -> [u8; PROOF_BYTES] {
        let tag = hmac::sign(&self.key(), &[label, source, receiver].concat());
        let mut out = [0; PROOF_BYTES];
        out.copy_from_slice(tag.as_ref());
        out
    }

    fn proves(&self, label: &[u8], proof: &[u8], source: &Nonce, receiver: &Nonce) -> bool {
        hmac::verify(&self.key(), &[label, source, receiver].concat(), proof).is_ok()
    }

    fn key(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &self.0)
    }
}

/// What a receiver says to a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// Go on.
    Good,
    /// It has no token.
    None,
    /// It has another one.
    Wrong,
    /// It takes TLS only.
    WantsTls,
}

impl Status {
    pub(crate) fn byte(self) -> u8 {
        match self {
            Status::Good => 0,
            Status::None => 1,
            Status::Wrong => 2,
            Status::WantsTls => 3,
        }
    }

    /// What the source is told; `Ok`: go on.
    pub(crate) fn check(byte: u8) -> Result<(), String> {
        Err(match byte {
            0 => return Ok(()),
            1 => "the receiver was started without --token-file, and this side with it: give the same token to both"
                .to_owned(),
            2 => "the receiver has another token: give both sides a --token-file with the same content".to_owned(),
            3 => "the receiver takes TLS only: give --tls-cert, --tls-key and --tls-ca here too".to_owned(),
            other => format!("the receiver answers the token by {other}, which nothing here means"),
        })
    }
}

/// A receiver's first answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reply {
    pub(crate) status: Status,
    pub(crate) nonce: Nonce,
}

impl Reply {
    /// The bytes.
    pub(crate) fn encode(&self) -> [u8; REPLY_BYTES] {
        let mut out = [0; REPLY_BYTES];
        out[..8].copy_from_slice(&TOKEN_MAGIC);
        out[8] = self.status.byte();
        out[9..].copy_from_slice(&self.nonce);
        out
    }

    /// The receiver's nonce, or why the source ends here.
    pub(crate) fn decode(bytes: &[u8; REPLY_BYTES]) -> Result<Nonce, String> {
        if bytes[..8] != TOKEN_MAGIC {
            return Err("what answers is no receiver that takes a token: is it older, or something else?".to_owned());
        }
        Status::check(bytes[8])?;
        let mut nonce = [0; 32];
        nonce.copy_from_slice(&bytes[9..]);
        Ok(nonce)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const GOOD: &[u8] = b"0123456789abcdef";

    #[test]
    fn one_newline_at_the_end_is_none_of_the_tokens() {
        let token = Token::new(GOOD).unwrap();
        for same in [&b"0123456789abcdef\n"[..], b"0123456789abcdef\r\n"] {
            assert_eq!(Token::new(same).unwrap(), token);
        }
        for other in [
            &b"0123456789abcdef\n\n"[..],
            b"0123456789abcdef\r",
            b"0123456789abcdef ",
            b"\n0123456789abcdef",
        ] {
            assert_ne!(Token::new(other).unwrap(), token);
        }
    }

    #[test]
    fn too_short_and_too_long_tokens_are_refused() {
        for (bytes, word) in [
            (vec![7; 15], "15 bytes"),
            (b"0123456789abcde\n".to_vec(), "15 bytes"),
            (vec![], "0 bytes"),
            (vec![7; 4097], "more than 4096"),
        ] {
            let error = Token::new(&bytes).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        assert!(Token::new(&[7; 16]).is_ok() && Token::new(&[7; 4096]).is_ok());
    }

    #[test]
    fn a_file_that_others_may_read_is_no_secret() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, GOOD).unwrap();
        for mode in [0o644, 0o640, 0o602, 0o601] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let error = Token::load(&path).unwrap_err().to_string();
            assert!(
                error.contains("chmod 600") && error.contains(&format!("{mode:o}")),
                "{error}"
            );
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(Token::load(&path).unwrap(), Token::new(GOOD).unwrap());
        std::fs::write(&path, [b'x'; 10_000]).unwrap();
        assert!(Token::load(&path).unwrap_err().to_string().contains("more than 4096"));
        assert!(
            Token::load(&folder.path().join("none"))
                .unwrap_err()
                .to_string()
                .contains("cannot be read")
        );
    }

    #[test]
    fn a_proof_is_of_one_side_one_token_and_both_nonces() {
        let (token, other) = (Token::new(GOOD).unwrap(), Token::new(&[1; 16]).unwrap());
        let (a, b) = ([1; 32], [2; 32]);
        let proof = token.source_proof(&a, &b);
        assert!(token.source_proves(&proof, &a, &b));
        assert!(
            !token.receiver_proves(&proof, &a, &b),
            "what one side proved is no proof of the other"
        );
        assert!(!token.source_proves(&proof, &b, &a) && !token.source_proves(&proof, &a, &a));
        assert!(!other.source_proves(&proof, &a, &b) && !token.source_proves(&proof[..31], &a, &b));
        assert!(token.receiver_proves(&token.receiver_proof(&a, &b), &a, &b));
        assert!(!format!("{token:?}").contains("0123"));
    }
}
