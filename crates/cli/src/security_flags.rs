//! The flags of both commands that say who may take part, and how what crosses is protected.

use crate::{Error, say_stderr};
use clap::Args;
use pageferry::{Address, Security, Tls, TlsFiles, Token};
use std::path::PathBuf;
use std::sync::Arc;

/// TLS, token, and plain TCP.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Security")]
pub struct SecurityFlags {
    /// This side's certificate, and behind it those between it and the CA's, in PEM: with --tls-key and --tls-ca, TLS 1.3
    /// on all connections, and no peer without a certificate of that CA
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// The private key of that certificate, in PEM
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// The CAs that sign peers' certificates, in PEM
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// Take only a peer whose certificate has this DNS name or IP address; may be repeated
    #[arg(long, value_name = "NAME")]
    pub allow_peer: Vec<String>,
    /// A file with a secret of 16 to 4096 bytes that nobody else may read: only a peer that knows it is taken. It encrypts
    /// nothing
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Allow plain TCP beyond this machine: whoever is on the way reads the guest's memory, and may change it
    #[arg(long)]
    pub insecure: bool,
}

impl SecurityFlags {
    /// What the flags mean for connections to, or at, `address`, which stands behind the flag `whose`. `name` is the name
    /// that a receiver's certificate must have. Looks a host's name up, and reads the files.
    ///
    /// # Errors
    /// [`Error::Usage`] names the flag or the file, and what to do about it.
    pub fn plan(&self, whose: &str, address: &Address, name: Option<&str>) -> Result<Security, Error> {
        let usage = |error: pageferry::Error| Error::Usage(error.to_string());
        let files = [
            ("--tls-cert", &self.tls_cert),
            ("--tls-key", &self.tls_key),
            ("--tls-ca", &self.tls_ca),
        ];
        let tls = match files {
            [(_, Some(cert)), (_, Some(key)), (_, Some(ca))] => Some(TlsFiles {
                cert: cert.clone(),
                key: key.clone(),
                ca: ca.clone(),
                name: name.map(str::to_owned),
                allow_peers: self.allow_peer.clone(),
            }),
            [(_, None), (_, None), (_, None)] => {
                if let Some(flag) = self.of_tls(name) {
                    return Err(Error::Usage(format!(
                        "{flag} goes with --tls-cert, --tls-key and --tls-ca: without TLS no peer has a name"
                    )));
                }
                None
            }
            files => {
                let missing: Vec<_> = files
                    .iter()
                    .filter(|(_, file)| file.is_none())
                    .map(|(flag, _)| *flag)
                    .collect();
                return Err(Error::Usage(format!(
                    "TLS takes --tls-cert, --tls-key and --tls-ca together: {} is missing",
                    missing.join(" and ")
                )));
            }
        };
        let security = Security {
            tls: tls
                .map(|files| Tls::load(&files).map(Arc::new))
                .transpose()
                .map_err(usage)?,
            token: self.token_file.as_deref().map(Token::load).transpose().map_err(usage)?,
            insecure: self.insecure,
        };
        security
            .check(address)
            .map_err(|error| Error::Usage(format!("{whose} {error}")))?;
        if whose == "--to"
            && let Some(tls) = &security.tls
        {
            tls.name_of(address).map_err(usage)?;
        }
        if security.is_exposed(address) {
            say_stderr(format_args!(
                "warning: --insecure: the guest's memory crosses the network unencrypted at {address}"
            ));
        }
        Ok(security)
    }

    /// The flag that makes no sense without TLS.
    fn of_tls(&self, name: Option<&str>) -> Option<&'static str> {
        if !self.allow_peer.is_empty() {
            return Some("--allow-peer");
        }
        name.map(|_| "--tls-name")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(flags: &SecurityFlags, address: &str, name: Option<&str>) -> Result<Security, String> {
        flags.plan("--to", &address.parse().unwrap(), name).map_err(|error| {
            assert_eq!(error.exit_code(), 2, "{error}");
            error.to_string()
        })
    }

    #[test]
    fn all_three_files_or_none() {
        let near = "tcp:127.0.0.1:1";
        assert!(plan(&SecurityFlags::default(), near, None).unwrap().tls.is_none());
        let flags = SecurityFlags {
            tls_cert: Some("c".into()),
            tls_ca: Some("a".into()),
            ..SecurityFlags::default()
        };
        assert!(plan(&flags, near, None).unwrap_err().contains("--tls-key is missing"));
        let flags = SecurityFlags {
            tls_key: Some("/none/key".into()),
            ..flags
        };
        let error = plan(&flags, near, None).unwrap_err();
        assert!(error.contains("--tls-cert c cannot be read"), "{error}");
        let flags = SecurityFlags {
            allow_peer: vec!["x".to_owned()],
            ..SecurityFlags::default()
        };
        assert!(plan(&flags, near, None).unwrap_err().contains("--allow-peer goes with"));
        let none = SecurityFlags::default();
        assert!(
            plan(&none, near, Some("x"))
                .unwrap_err()
                .contains("--tls-name goes with")
        );
    }

    #[test]
    fn plain_tcp_beyond_this_machine_has_to_be_asked_for() {
        let mut flags = SecurityFlags::default();
        let error = plan(&flags, "tcp:192.0.2.1:1", None).unwrap_err();
        assert!(
            error.contains("--to tcp:192.0.2.1:1") && error.contains("--insecure"),
            "{error}"
        );
        flags.insecure = true;
        assert!(plan(&flags, "tcp:192.0.2.1:1", None).is_ok());
    }
}
