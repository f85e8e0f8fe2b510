//! Certificates for tests.

use pageferry::{Security, Tls, TlsPem};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    date_time_ymd,
};
use std::sync::Arc;

/// A CA.
pub struct Ca {
    pub pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Ca {
    pub fn new() -> Ca {
        Ca::named("a test's CA")
    }

    pub fn named(name: &str) -> Ca {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().unwrap();
        let cert = params.self_signed(&key).unwrap();
        Ca {
            pem: cert.pem(),
            issuer: Issuer::new(params, key),
        }
    }

    /// A certificate and its key, for `names`; `change` may spoil it.
    pub fn sign(&self, names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> (String, String) {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        (cert.pem(), key.serialize_pem())
    }

    /// What a side with such a certificate has, in PEM.
    pub fn side(&self, names: &[&str]) -> TlsPem {
        let (cert, key) = self.sign(names, |_| {});
        TlsPem {
            cert,
            key,
            ca: self.pem.clone(),
            ..TlsPem::default()
        }
    }

    /// The same, of a certificate that expired in 2001.
    pub fn expired(&self, names: &[&str]) -> TlsPem {
        let (cert, key) = self.sign(names, |params| {
            params.not_before = date_time_ymd(2000, 1, 1);
            params.not_after = date_time_ymd(2001, 2, 3);
        });
        TlsPem {
            cert,
            key,
            ca: self.pem.clone(),
            ..TlsPem::default()
        }
    }
}

pub fn tls(pem: TlsPem) -> Security {
    Security {
        tls: Some(Arc::new(Tls::from_pem(pem).unwrap())),
        ..Security::default()
    }
}
