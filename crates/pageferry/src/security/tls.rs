//! One side's certificate, key and CA, made ready for both directions.
//!
//! TLS 1.3 only, certificates on both sides, no resumption (so no tickets and no early data), one application protocol:
//! what is not offered cannot be downgraded to.

use super::names::{Allowed, AllowedClients, AllowedServers};
use crate::{Address, Error};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::{self, cipher_suite};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig, version};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// The application protocol: a TLS service of another kind is told so.
pub(crate) const ALPN: &[u8] = b"pageferry";

/// The most bytes of a PEM file.
const MAX_PEM_BYTES: u64 = 1 << 20;

/// The three files, and the names to check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// This side's certificate, and behind it those between it and the CA's. PEM.
    pub cert: PathBuf,
    /// Its private key. PEM.
    pub key: PathBuf,
    /// The CAs that sign peers' certificates. PEM.
    pub ca: PathBuf,
    /// The name that a receiver's certificate must have, in place of the host's.
    pub name: Option<String>,
    /// Peers that are let in, by a name of their certificates; empty: all that the CA signed.
    pub allow_peers: Vec<String>,
}

/// The same as text, for who has no files: a host that is told over its control socket.
#[derive(Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsPem {
    /// Certificates.
    pub cert: String,
    /// Private key.
    pub key: String,
    /// CAs.
    pub ca: String,
    /// The name that a receiver's certificate must have, in place of the host's.
    #[serde(default)]
    pub name: Option<String>,
    /// Peers that are let in.
    #[serde(default)]
    pub allow_peers: Vec<String>,
}

impl fmt::Debug for TlsPem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsPem")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// Which end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Connects.
    Source,
    /// Is connected to.
    Receiver,
}

impl Side {
    /// What the peer is called.
    pub(crate) fn peer(self) -> &'static str {
        match self {
            Side::Source => "receiver",
            Side::Receiver => "source",
        }
    }
}

/// TLS, ready for use on either side.
#[derive(Clone)]
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    name: Option<ServerName<'static>>,
    pem: TlsPem,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The suites of TLS 1.3, those first that cost least: the key of 128 bits is as far out of reach as the one of 256, and has
/// ten rounds in place of fourteen.
fn provider() -> CryptoProvider {
    CryptoProvider {
        cipher_suites: vec![
            cipher_suite::TLS13_AES_128_GCM_SHA256,
            cipher_suite::TLS13_AES_256_GCM_SHA384,
            cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ],
        ..aws_lc_rs::default_provider()
    }
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// [`Error::Options`] names the file that cannot be used, and what to do about it.
    pub fn load(files: &TlsFiles) -> Result<Self, Error> {
        let pem = TlsPem {
            cert: read(&files.cert, "--tls-cert")?,
            key: read(&files.key, "--tls-key")?,
            ca: read(&files.ca, "--tls-ca")?,
            name: files.name.clone(),
            allow_peers: files.allow_peers.clone(),
        };
        let at = |path: &PathBuf, flag: &str| format!("{flag} {}", path.display());
        Tls::build(
            pem,
            &at(&files.cert, "--tls-cert"),
            &at(&files.key, "--tls-key"),
            &at(&files.ca, "--tls-ca"),
        )
    }

    /// From what the files hold.
    ///
    /// # Errors
    /// [`Error::Options`] says which text cannot be used.
    pub fn from_pem(pem: TlsPem) -> Result<Self, Error> {
        Tls::build(pem, "the certificate", "the key", "the CA")
    }

    /// What it was made of, the private key with it.
    pub(crate) fn pem(&self) -> &TlsPem {
        &self.pem
    }

    pub(crate) fn client(&self) -> &Arc<ClientConfig> {
        &self.client
    }

    pub(crate) fn server(&self) -> &Arc<ServerConfig> {
        &self.server
    }

    /// The name that the receiver at `address` must prove.
    ///
    /// # Errors
    /// [`Error::Options`] where there is none to go by.
    pub fn name_of(&self, address: &Address) -> Result<ServerName<'static>, Error> {
        match (&self.name, address) {
            (Some(name), _) => Ok(name.clone()),
            (None, Address::Tcp { host, .. }) => name("the host to connect to", host),
            (None, Address::Unix(_) | Address::Vsock { .. }) => Err(Error::Options(format!(
                "{address} is no name that a certificate could have: give --tls-name NAME, a name of the receiver's certificate"
            ))),
        }
    }

    fn build(pem: TlsPem, cert_at: &str, key_at: &str, ca_at: &str) -> Result<Self, Error> {
        let wrong = |text: String| Error::Options(text);
        let chain = certificates(&pem.cert, cert_at)?;
        let key = PrivateKeyDer::from_pem_slice(pem.key.as_bytes()).map_err(|e| {
            wrong(format!(
                "{key_at} has no private key in PEM ({e}); give the key that belongs to the certificate"
            ))
        })?;
        let mut roots = RootCertStore::empty();
        for ca in certificates(&pem.ca, ca_at)? {
            roots
                .add(ca)
                .map_err(|e| wrong(format!("{ca_at} has a certificate that cannot be used as a CA: {e}")))?;
        }
        let roots = Arc::new(roots);
        let name_given = pem.name.as_deref().map(|given| name("--tls-name", given)).transpose()?;
        let allowed = pem.allow_peers.iter().map(|given| name("--allow-peer", given));
        let allowed = Allowed(allowed.collect::<Result<_, _>>()?);
        let provider = Arc::new(provider());
        // A process's first random number takes tens of milliseconds, which would be a migration's.
        provider
            .secure_random
            .fill(&mut [0])
            .map_err(|_| wrong("this machine gives no random numbers, which TLS cannot be without".to_owned()))?;
        let unfit = |e: rustls::Error| {
            wrong(match e {
                rustls::Error::InconsistentKeys(_) => {
                    format!("{key_at} is not the key of {cert_at}: give the two that were made together")
                }
                e => format!("{cert_at} and {key_at} cannot be used: {e}"),
            })
        };
        Ok(Tls {
            client: client(&provider, &roots, &allowed, &chain, &key).map_err(unfit)?,
            server: server(&provider, &roots, &allowed, chain, key).map_err(unfit)?,
            name: name_given,
            pem,
        })
    }
}

fn client(
    provider: &Arc<CryptoProvider>,
    roots: &Arc<RootCertStore>,
    allowed: &Allowed,
    chain: &[CertificateDer<'static>],
    key: &PrivateKeyDer<'static>,
) -> Result<Arc<ClientConfig>, rustls::Error> {
    let inner = WebPkiServerVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(provider));
    let verifier = AllowedServers {
        inner: inner.build().map_err(general)?,
        allowed: allowed.clone(),
    };
    let mut config = ClientConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_auth_cert(chain.to_vec(), key.clone_key())?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

fn server(
    provider: &Arc<CryptoProvider>,
    roots: &Arc<RootCertStore>,
    allowed: &Allowed,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<Arc<ServerConfig>, rustls::Error> {
    let inner = WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(provider));
    let verifier = AllowedClients {
        inner: inner.build().map_err(general)?,
        allowed: allowed.clone(),
    };
    let mut config = ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&version::TLS13])?
        .with_client_cert_verifier(Arc::new(verifier))
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

fn general(error: impl ToString) -> rustls::Error {
    rustls::Error::General(error.to_string())
}

fn read(path: &PathBuf, flag: &str) -> Result<String, Error> {
    let shown = path.display();
    let failed = |e: std::io::Error| Error::Options(format!("{flag} {shown} cannot be read: {e}"));
    let size = std::fs::metadata(path).map_err(failed)?.len();
    if size > MAX_PEM_BYTES {
        return Err(Error::Options(format!(
            "{flag} {shown} has {size} bytes, which is no PEM file of a certificate or key"
        )));
    }
    std::fs::read_to_string(path).map_err(failed)
}

fn certificates(pem: &str, at: &str) -> Result<Vec<CertificateDer<'static>>, Error> {
    let wrong = |why: String| Error::Options(format!("{at} {why}"));
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    let all = all.map_err(|e| wrong(format!("is damaged: {e}")))?;
    match all.is_empty() {
        true => Err(wrong(
            "has no certificate in PEM: its text begins with -----BEGIN CERTIFICATE-----".to_owned(),
        )),
        false => Ok(all),
    }
}

fn name(flag: &str, given: &str) -> Result<ServerName<'static>, Error> {
    ServerName::try_from(given.to_owned()).map_err(|_| {
        Error::Options(format!(
            "{flag} \"{given}\" is neither a DNS name nor an IP address, so no certificate has it"
        ))
    })
}
