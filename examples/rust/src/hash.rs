//! Chunk hashes: their text and their exact value. Needs nothing but the standard library.

use std::fmt;

/// A 64-bit integer (-2^63 to 2^64-1), or a digest of 32 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChunkHash {
    Signed(i64),
    /// Only from 2^63 on: everything smaller is `Signed`, so that equal hashes are equal values.
    Unsigned(u64),
    Digest([u8; 32]),
}

#[derive(Debug, PartialEq, Eq)]
pub struct NotAHash(pub String);

impl fmt::Display for NotAHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is not a chunk hash", self.0)
    }
}

impl std::error::Error for NotAHash {}

impl ChunkHash {
    pub fn from_u64(value: u64) -> Self {
        match i64::try_from(value) {
            Ok(signed) => Self::Signed(signed),
            Err(_) => Self::Unsigned(value),
        }
    }

    /// Strictly what the engine prints: a signed hexadecimal integer without padding, or 64 hex digits.
    pub fn parse(text: &str) -> Result<Self, NotAHash> {
        let wrong = || NotAHash(text.to_owned());
        let hex = |digits: &str| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_hexdigit());
        if text.len() == 64 && hex(text) {
            let mut digest = [0u8; 32];
            for (place, byte) in digest.iter_mut().enumerate() {
                *byte = u8::from_str_radix(&text[2 * place..2 * place + 2], 16).map_err(|_| wrong())?;
            }
            return Ok(Self::Digest(digest));
        }
        let (negative, digits) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        if !hex(digits) || digits.len() > 16 || (digits.starts_with('0') && text != "0") {
            return Err(wrong());
        }
        let magnitude = u64::from_str_radix(digits, 16).map_err(|_| wrong())?;
        if !negative {
            return Ok(Self::from_u64(magnitude));
        }
        if magnitude > 1 << 63 {
            return Err(wrong());
        }
        Ok(Self::Signed((magnitude as i64).wrapping_neg()))
    }
}

impl fmt::Display for ChunkHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signed(value) if *value < 0 => write!(f, "-{:x}", value.unsigned_abs()),
            Self::Signed(value) => write!(f, "{value:x}"),
            Self::Unsigned(value) => write!(f, "{value:x}"),
            Self::Digest(bytes) => bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_come_back() {
        let digest = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262";
        for text in [
            "0",
            "1",
            "7f",
            "80",
            "-1",
            "-20",
            "ff",
            "7fffffffffffffff",
            "-8000000000000000",
            "8000000000000000",
            "ffffffffffffffff",
            "-6ed9a448787a198f",
            "3f5c45ecbab5e9fd",
            digest,
        ] {
            assert_eq!(ChunkHash::parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn values_are_exact() {
        assert_eq!(ChunkHash::parse("-8000000000000000"), Ok(ChunkHash::Signed(i64::MIN)));
        assert_eq!(ChunkHash::parse("ffffffffffffffff"), Ok(ChunkHash::Unsigned(u64::MAX)));
        assert_eq!(ChunkHash::parse("-1"), Ok(ChunkHash::Signed(-1)));
        assert_eq!(ChunkHash::parse("FF"), Ok(ChunkHash::Signed(255)));
    }

    #[test]
    fn what_is_no_hash_is_refused() {
        for text in [
            "",
            "-",
            "-0",
            "00",
            "+1",
            "0x1",
            "1 ",
            "1\n",
            "1_0",
            "-8000000000000001",
            "10000000000000000",
            "é",
        ] {
            assert!(ChunkHash::parse(text).is_err(), "{text:?}");
        }
    }
}
