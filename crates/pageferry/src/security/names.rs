//! Names in certificates, and which peers they let in.

use rustls::DistinguishedName;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, Error, OtherError, SignatureScheme};
use std::sync::Arc;
use webpki::EndEntityCert;

/// The most names of a certificate that are printed.
const MAX_PRINTED: usize = 8;

/// A certificate that is good, of a peer that is not let in.
#[derive(Debug, thiserror::Error)]
#[error("its certificate is for {}, and --allow-peer takes {} only", list(.names), list(.allowed))]
pub(super) struct NotAllowed {
    names: Vec<String>,
    allowed: Vec<String>,
}

/// Lets peers in by the DNS names (or IP addresses) of their certificates; all where none is given. A certificate's common
/// name counts for nothing, as in every verifier of today.
#[derive(Clone, Debug, Default)]
pub(super) struct Allowed(pub(super) Vec<ServerName<'static>>);

impl Allowed {
    fn check(&self, end_entity: &CertificateDer<'_>) -> Result<(), Error> {
        if self.0.is_empty() {
            return Ok(());
        }
        let cert = EndEntityCert::try_from(end_entity)
            .map_err(|_| Error::InvalidCertificate(CertificateError::BadEncoding))?;
        let fits = |name: &ServerName<'static>| cert.verify_is_valid_for_subject_name(name).is_ok();
        if self.0.iter().any(fits) {
            return Ok(());
        }
        let error = NotAllowed {
            names: cert.valid_dns_names().take(MAX_PRINTED).map(str::to_owned).collect(),
            allowed: self.0.iter().map(|name| name.to_str().into_owned()).collect(),
        };
        let other = CertificateError::Other(OtherError(Arc::new(error)));
        Err(Error::InvalidCertificate(other))
    }
}

/// A list of names for a sentence.
pub(super) fn list(names: &[String]) -> String {
    match names {
        [] => "no DNS name".to_owned(),
        names => names.join(", "),
    }
}

/// Checks a receiver's certificate as ever, then its name.
#[derive(Debug)]
pub(super) struct AllowedServers {
    pub(super) inner: Arc<dyn ServerCertVerifier>,
    pub(super) allowed: Allowed,
}

impl ServerCertVerifier for AllowedServers {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified = self
            .inner
            .verify_server_cert(end_entity, intermediates, name, ocsp, now)?;
        self.allowed.check(end_entity)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, cert, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, cert, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

/// Checks a source's certificate as ever, then its name.
#[derive(Debug)]
pub(super) struct AllowedClients {
    pub(super) inner: Arc<dyn ClientCertVerifier>,
    pub(super) allowed: Allowed,
}

impl ClientCertVerifier for AllowedClients {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.inner.verify_client_cert(end_entity, intermediates, now)?;
        self.allowed.check(end_entity)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, cert, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, cert, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
