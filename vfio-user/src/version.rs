//! The first message: protocol version and capabilities of both ends.

use crate::error::Malformed;
use crate::fields::{Fields, Put};
use serde::{Deserialize, Serialize};

/// Maximum length in bytes of an accepted JSON text.
pub const MAX_VERSION_DATA: usize = 4096;

/// The payload of the first message, and of its reply.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Version {
    /// Major version: equal on both sides.
    pub major: u16,
    /// Minor version: both ends use the lower one.
    pub minor: u16,
    /// Capabilities of the sender. The server replies with a subset of the client's.
    pub capabilities: Capabilities,
}

/// Capabilities of the sender of a [`Version`]. A `None` field is not sent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Maximum number of descriptors that the sender accepts in one message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_msg_fds: Option<u64>,
    /// Maximum number of bytes that one message may transfer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_data_xfer_size: Option<u64>,
    /// Maximum number of stretches of memory that may be mapped at the same time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_dma_maps: Option<u64>,
    /// Page sizes, or'ed together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pgsizes: Option<u64>,
    /// Whether [`Request::RegionWriteMulti`](crate::Request::RegionWriteMulti) is supported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_multiple: Option<bool>,
    /// Capability of urnic's own client and server only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub urnic: Option<Urnic>,
}

/// urnic's own capability. The client sends `identity`; only then the server replies with `memory`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Urnic {
    /// The client's DMA addresses are its own virtual addresses.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub identity: bool,
    /// How the server accesses memory that came without a descriptor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
}

/// How a server accesses memory that came without a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Memory {
    /// By `process_vm_readv` and `process_vm_writev`.
    ProcessVm,
    /// By [`Request::DmaRead`](crate::Request::DmaRead) and
    /// [`Request::DmaWrite`](crate::Request::DmaWrite).
    Messages,
}

impl Capabilities {
    /// Maximum number of bytes that the sender accepts in one transfer; 1 MiB by default.
    pub fn data_xfer_size(&self) -> usize {
        self.max_data_xfer_size
            .map_or(1 << 20, |n| usize::try_from(n).unwrap_or(usize::MAX))
    }
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct VersionData {
    #[serde(default)]
    capabilities: Option<Capabilities>,
}

impl Version {
    pub(crate) fn parse(mut fields: Fields<'_>) -> Result<Version, Malformed> {
        let (major, minor) = (fields.u16()?, fields.u16()?);
        let text = match fields.0 {
            [] => {
                return Ok(Version {
                    major,
                    minor,
                    ..Version::default()
                });
            }
            [text @ .., 0] if text.len() <= MAX_VERSION_DATA => text,
            _ => return Err(Malformed::Json),
        };
        let data: VersionData = serde_json::from_slice(text).map_err(|_| Malformed::Json)?;
        Ok(Version {
            major,
            minor,
            capabilities: data.capabilities.unwrap_or_default(),
        })
    }

    pub(crate) fn emit(&self, out: &mut Vec<u8>) {
        out.put16(self.major);
        out.put16(self.minor);
        let data = VersionData {
            capabilities: Some(self.capabilities.clone()),
        };
        // Numbers and fixed names: serialization cannot fail.
        out.extend(serde_json::to_vec(&data).unwrap_or_default());
        out.push(0);
    }
}
