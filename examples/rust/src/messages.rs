//! The messages that a memory system writes and reads. Keys that are not named here are passed over by serde.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::hash::ChunkHash;

/// `prefetch` and `evict`: which of them says the entry's `type`.
#[derive(Debug, Default, Serialize)]
pub struct Command {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub issued_at_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub issuer: Option<String>,
    pub chunk_hashes: Vec<ChunkHash>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lookup_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sources: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub locations: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttl_ms: Option<u64>,
}

#[derive(Debug, Deserialize)]
pub struct RequestFinished {
    pub request_id: String,
    #[serde(default)]
    pub chunk_hashes: Vec<ChunkHash>,
    #[serde(default)]
    pub context: BTreeMap<String, serde_json::Value>,
    pub publisher: String,
    pub epoch: u64,
    pub seq: u64,
}

/// One worker's answers to one batch of commands.
#[derive(Debug, Deserialize)]
pub struct Results {
    pub worker: String,
    #[serde(default)]
    pub results: Vec<CommandResult>,
}

#[derive(Debug, Deserialize)]
pub struct CommandResult {
    pub command_id: String,
    pub status: String,
    #[serde(default)]
    pub counts: BTreeMap<String, u64>,
}

impl CommandResult {
    /// `deferred` is not final: chunks are in use, and a final result follows.
    pub fn is_final(&self) -> bool {
        self.status != "deferred"
    }

    pub fn went_wrong(&self) -> bool {
        matches!(self.status.as_str(), "failed" | "rejected" | "expired")
    }
}

impl Serialize for ChunkHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Signed(value) => serializer.serialize_i64(*value),
            Self::Unsigned(value) => serializer.serialize_u64(*value),
            Self::Digest(bytes) => serializer.serialize_bytes(bytes),
        }
    }
}

impl<'de> Deserialize<'de> for ChunkHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Forms;

        impl Visitor<'_> for Forms {
            type Value = ChunkHash;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a 64-bit integer, 32 bytes, or the text of either")
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<ChunkHash, E> {
                Ok(ChunkHash::Signed(value))
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<ChunkHash, E> {
                Ok(ChunkHash::from_u64(value))
            }

            fn visit_bytes<E: de::Error>(self, value: &[u8]) -> Result<ChunkHash, E> {
                let digest =
                    <[u8; 32]>::try_from(value).map_err(|_| E::invalid_length(value.len(), &self))?;
                Ok(ChunkHash::Digest(digest))
            }

            fn visit_str<E: de::Error>(self, value: &str) -> Result<ChunkHash, E> {
                ChunkHash::parse(value).map_err(E::custom)
            }
        }

        deserializer.deserialize_any(Forms)
    }
}
