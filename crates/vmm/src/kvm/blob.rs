//! The kernel's structures in saved state: their bytes, in hexadecimal.
//!
//! Their layout is the kernel's binary interface and does not change. What comes in has to have just the right length; the
//! content is for KVM to check.

use crate::{Error, Result};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt::Write;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A kernel structure as its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Blob(Vec<u8>);

impl Blob {
    /// The bytes of `value`.
    pub(crate) fn of<T: IntoBytes + Immutable>(value: &T) -> Blob {
        Blob(value.as_bytes().to_vec())
    }

    /// Bytes as they are.
    pub(crate) fn from_bytes(bytes: Vec<u8>) -> Blob {
        Blob(bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The structure that these bytes are.
    ///
    /// # Errors
    /// A wrong length; `what` of `section` says of what.
    pub(crate) fn read<T: FromBytes>(&self, section: &str, what: &str) -> Result<T> {
        T::read_from_bytes(&self.0).map_err(|_| {
            let (came, wanted) = (self.0.len(), size_of::<T>());
            Error::state(section, format!("{what}: {came} bytes came, it has {wanted}"))
        })
    }
}

impl Serialize for Blob {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex(&self.0))
    }
}

impl<'de> Deserialize<'de> for Blob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Blob, D::Error> {
        let text = Cow::<str>::deserialize(deserializer)?;
        let digit = |c: u8| char::from(c).to_digit(16).and_then(|d| u8::try_from(d).ok());
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        let bytes = pairs
            .iter()
            .map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?))
            .collect();
        match (bytes, rest) {
            (Some(bytes), []) => Ok(Blob(bytes)),
            _ => Err(D::Error::custom("bytes are written as pairs of hexadecimal digits")),
        }
    }
}

/// `bytes` in hexadecimal, without gaps.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            // Writing to a string cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvm_bindings::kvm_mp_state;

    #[test]
    fn bytes_come_back_as_they_went() {
        let blob = Blob::of(&kvm_mp_state { mp_state: 0x0102_03ff });
        let text = serde_json::to_string(&blob).unwrap();
        assert_eq!(text, "\"ff030201\"");
        let back: Blob = serde_json::from_str(&text).unwrap();
        assert_eq!(
            back.read::<kvm_mp_state>("s", "mp_state").unwrap().mp_state,
            0x0102_03ff
        );
    }

    #[test]
    fn another_length_and_what_is_not_hexadecimal_are_refused() {
        for text in ["\"0\"", "\"0g\"", "\"+1\"", "\"\u{e9}\"", "1", "\"00 0\""] {
            assert!(serde_json::from_str::<Blob>(text).is_err(), "{text}");
        }
        for text in ["\"\"", "\"010203\"", "\"0102030405\""] {
            let blob: Blob = serde_json::from_str(text).unwrap();
            let error = blob.read::<kvm_mp_state>("vcpu7", "mp_state").unwrap_err().to_string();
            assert!(error.contains("vcpu7") && error.contains("it has 4"), "{error}");
        }
    }
}
