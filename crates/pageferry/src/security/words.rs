//! What went wrong with TLS, in a sentence for the person who can mend it.

use super::Side;
use super::names::{NotAllowed, list};
use rustls::pki_types::UnixTime;
use rustls::{AlertDescription, CertificateError, Error};

/// A sentence for what ended a handshake, or a connection, on `side`.
pub(crate) fn sentence(side: Side, error: &Error) -> String {
    let peer = side.peer();
    match error {
        Error::AlertReceived(alert) => refusal(peer, *alert),
        Error::InvalidCertificate(wrong) => certificate(side, wrong),
        Error::NoCertificatesPresented => format!("the {peer} shows no certificate: it needs --tls-cert and --tls-key"),
        Error::InvalidMessage(_) => format!("what the {peer} sends is no TLS: is it started without --tls-cert?"),
        Error::PeerIncompatible(why) => format!("the {peer} does not offer what is needed, TLS 1.3 above all: {why:?}"),
        Error::DecryptError => format!("what the {peer} sent was changed on the way"),
        error => format!("TLS with the {peer} failed: {error}"),
    }
}

/// Whether one of the two sides said no, rather than something having broken.
pub(crate) fn refused_by_tls(error: &Error) -> bool {
    !matches!(error, Error::DecryptError | Error::General(_) | Error::EncryptError)
}

/// What the peer has against us, as far as an alert can tell.
fn refusal(peer: &str, alert: AlertDescription) -> String {
    match alert {
        AlertDescription::UnknownCA => {
            format!("the {peer} does not take this side's certificate: its --tls-ca did not sign it")
        }
        AlertDescription::DecryptError => format!(
            "the {peer} does not take this side's certificate: a CA of the name of its --tls-ca signed it, but another one"
        ),
        AlertDescription::CertificateExpired => format!(
            "the {peer} does not take this side's certificate: by its clock it has expired, or is not valid yet"
        ),
        AlertDescription::BadCertificate => {
            format!("the {peer} does not take this side's certificate: it expects another name in it")
        }
        AlertDescription::CertificateUnknown => {
            format!(
                "the {peer} does not take this side's certificate: none of its names is among the --allow-peer there"
            )
        }
        AlertDescription::UnsupportedCertificate => format!(
            "the {peer} does not take this side's certificate: its extended key usage must have serverAuth and clientAuth"
        ),
        AlertDescription::CertificateRequired => format!("the {peer} asks for a certificate, and got none"),
        AlertDescription::HandshakeFailure => {
            format!("the {peer} takes no TLS: it was started without --tls-cert, --tls-key and --tls-ca")
        }
        AlertDescription::NoApplicationProtocol => {
            format!("what answers as the {peer} speaks TLS, but not this protocol")
        }
        alert => format!("the {peer} ended TLS: {alert:?}"),
    }
}

fn certificate(side: Side, wrong: &CertificateError) -> String {
    let peer = side.peer();
    match wrong {
        CertificateError::ExpiredContext { time, not_after } => format!(
            "the {peer}'s certificate expired on {}, and it is {} here: give it a new one",
            date(*not_after),
            date(*time)
        ),
        CertificateError::NotValidYetContext { time, not_before } => format!(
            "the {peer}'s certificate is not valid before {}, and it is {} here: are both clocks right?",
            date(*not_before),
            date(*time)
        ),
        CertificateError::UnknownIssuer => {
            format!(
                "the {peer}'s certificate is not signed by a CA of --tls-ca: are both sides' files from the same CA?"
            )
        }
        CertificateError::BadSignature => format!(
            "the {peer}'s certificate is signed by a CA of the name of one in --tls-ca, but not by that one: are both sides' \
             files from the same CA?"
        ),
        CertificateError::NotValidForNameContext { expected, presented } => format!(
            "the {peer}'s certificate is for {}, not for {}: connect to it by a name that it has, or give --tls-name",
            list(presented),
            expected.to_str()
        ),
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => format!(
            "the {peer}'s certificate is not for this use: its extended key usage must have serverAuth and clientAuth"
        ),
        CertificateError::Other(other) => match other.0.downcast_ref::<NotAllowed>() {
            Some(not_allowed) => format!("the {peer} is not let in: {not_allowed}"),
            None => format!("the {peer}'s certificate is refused: {other}"),
        },
        wrong => format!("the {peer}'s certificate is refused: {wrong}"),
    }
}

/// `2026-01-31 12:00 UTC`.
fn date(time: UnixTime) -> String {
    let seconds = time.as_secs();
    let (days, minutes) = (seconds / 86_400, seconds % 86_400 / 60);
    let (year, month, day) = civil(days);
    format!("{year}-{month:02}-{day:02} {:02}:{:02} UTC", minutes / 60, minutes % 60)
}

/// Year, month and day, `days` after 1970-01-01, in the Gregorian calendar.
fn civil(mut days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    // 400 years have 146,097 days: few steps are left, whatever a certificate says.
    let mut year = 1970 + days / 146_097 * 400;
    days %= 146_097;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (1_000_000_000, "2001-09-09 01:46 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
            (16_725_225_600, "2500-01-01 00:00 UTC"),
        ] {
            assert_eq!(date(UnixTime::since_unix_epoch(Duration::from_secs(seconds))), text);
        }
    }
}
