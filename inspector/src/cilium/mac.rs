//! Ethernet addresses.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An Ethernet address, in the order in which it goes over the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// Whether all bytes are 0: no address.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self.0 == [0; 6]
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            let colon = if index == 0 { "" } else { ":" };
            write!(f, "{colon}{byte:02x}")?;
        }
        Ok(())
    }
}

/// Text that is no Ethernet address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no Ethernet address: six hexadecimal bytes with colons between them")]
pub struct MacError(String);

impl FromStr for Mac {
    type Err = MacError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            *byte = parts
                .next()
                // `from_str_radix` would accept a sign.
                .filter(|part| part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit()))
                .and_then(|part| u8::from_str_radix(part, 16).ok())
                .ok_or_else(|| MacError(text.to_owned()))?;
        }
        if parts.next().is_some() {
            return Err(MacError(text.to_owned()));
        }
        Ok(Self(bytes))
    }
}

impl Serialize for Mac {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Mac {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let mac: Mac = "0e:01:0A:ff:00:9c".parse().unwrap();
        assert_eq!(mac, Mac([0x0e, 0x01, 0x0a, 0xff, 0x00, 0x9c]));
        assert_eq!(mac.to_string(), "0e:01:0a:ff:00:9c");
        assert_eq!(serde_json::to_string(&mac).unwrap(), r#""0e:01:0a:ff:00:9c""#);
        assert_eq!(serde_json::from_str::<Mac>(r#""0e:01:0a:ff:00:9c""#).unwrap(), mac);
    }

    #[test]
    fn rubbish_is_refused() {
        for text in ["", "0e:01:0a:ff:00", "0e:01:0a:ff:00:9c:00", "+e:01:0a:ff:00:9c", "é:é"] {
            assert!(text.parse::<Mac>().is_err(), "{text}");
        }
    }
}
