//! The limits of the device and its address table, as the driver reads them once.

use rustix::io::Errno;
use urnic_config::Config;
use urnic_device::command::{Count, DeviceAttributes, Nothing, Opcode, features};
use urnic_device::stream::{self, ip_of};

use crate::command::CommandQueue;
use urnic_process::addressing::Gid;

/// Largest address table that the driver reads.
const MAX_GIDS: usize = 256;

/// Limits and firmware version of the device, in native numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Firmware version.
    pub firmware: (u16, u16, u16),
    /// Largest registration in bytes.
    pub max_mr_size: u64,
    /// Queue pairs.
    pub max_qp: u32,
    /// Work requests per queue.
    pub max_qp_wr: u32,
    /// Elements per request.
    pub max_sge: u32,
    /// Elements of a Read.
    pub max_sge_rd: u32,
    /// Inline bytes per request.
    pub max_inline: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries per completion queue.
    pub max_cqe: u32,
    /// Registrations.
    pub max_mr: u32,
    /// Protection domains.
    pub max_pd: u32,
    /// Memory windows.
    pub max_mw: u32,
    /// Shared receive queues.
    pub max_srq: u32,
    /// Entries per shared receive queue.
    pub max_srq_wr: u32,
    /// Inbound Reads per queue pair.
    pub max_ird: u32,
    /// Outbound Reads per queue pair.
    pub max_ord: u32,
    /// Completion vectors.
    pub completion_vectors: u32,
    /// Feature bits, see `urnic_device::command::features`.
    pub features: u32,
}

impl From<DeviceAttributes> for Attributes {
    fn from(d: DeviceAttributes) -> Attributes {
        let firmware = d.firmware.get();
        Attributes {
            firmware: ((firmware >> 32) as u16, (firmware >> 16) as u16, firmware as u16),
            max_mr_size: d.max_mr_size.get(),
            max_qp: d.max_qp.get(),
            max_qp_wr: d.max_qp_wr.get(),
            max_sge: d.max_sge.get(),
            max_sge_rd: d.max_sge_rd.get(),
            max_inline: d.max_inline.get(),
            max_cq: d.max_cq.get(),
            max_cqe: d.max_cqe.get(),
            max_mr: d.max_mr.get(),
            max_pd: d.max_pd.get(),
            max_mw: d.max_mw.get(),
            max_srq: d.max_srq.get(),
            max_srq_wr: d.max_srq_wr.get(),
            max_ird: d.max_ird.get(),
            max_ord: d.max_ord.get(),
            completion_vectors: d.completion_vectors.get(),
            features: d.features.get(),
        }
    }
}

/// Reads the limits of the device.
///
/// # Errors
/// The errors of the device.
pub(crate) fn read_attributes(commands: &CommandQueue) -> Result<Attributes, Errno> {
    let (buffer, _) =
        commands.fetch::<_, Nothing>(Opcode::QueryDevice, &Nothing {}, size_of::<DeviceAttributes>())?;
    Ok(Attributes::from(buffer.read::<DeviceAttributes>(0)))
}

/// Reads the address table of the device.
///
/// # Errors
/// The errors of the device.
pub(crate) fn read_gids(commands: &CommandQueue) -> Result<Vec<Gid>, Errno> {
    const ENTRY: usize = size_of::<stream::Address>();
    let (buffer, count) =
        commands.fetch::<_, Count>(Opcode::QueryAddresses, &Nothing {}, MAX_GIDS * ENTRY)?;
    let count = (count.count.get() as usize).min(MAX_GIDS);
    Ok((0..count)
        .map(|i| buffer.read::<stream::Address>(i * ENTRY))
        .map(|a| Gid {
            ip: ip_of(&a.ip),
            scope: a.scope.get(),
            prefix_len: u8::try_from(a.prefix_len.get()).unwrap_or(u8::MAX),
        })
        .collect())
}

/// Checks that a device with these attributes has the wire that the configuration names, for all
/// peers or for some. One line says if it does not.
///
/// # Errors
/// `EOPNOTSUPP`.
pub(crate) fn require_wire(config: &Config, attributes: &Attributes) -> Result<(), Errno> {
    if !config.speaks_roce_to_some() || attributes.features & features::ROCE != 0 {
        return Ok(());
    }
    tracing::error!(
        "wire=roce: the device {} has no queue pairs that speak RoCE v2 (feature ROCE), so it cannot be opened; \
         set wire=iwarp, also in [[peer]], or use a device of a later version",
        config.device
    );
    Err(Errno::OPNOTSUPP)
}

#[cfg(test)]
mod tests {
    use super::*;
    use urnic_config::{Identity, Wire};
    use zerocopy::FromZeros;

    #[test]
    fn a_device_without_the_configured_wire_is_refused() {
        for (identity, wire, features, expected) in [
            (Identity::Roce, Wire::Roce, 0, Err(Errno::OPNOTSUPP)),
            (Identity::Roce, Wire::Roce, !features::ROCE, Err(Errno::OPNOTSUPP)),
            (Identity::Roce, Wire::Roce, features::ROCE, Ok(())),
            (Identity::Roce, Wire::Iwarp, 0, Ok(())),
            // The option has no effect on an RNIC.
            (Identity::Iwarp, Wire::Roce, 0, Ok(())),
        ] {
            let config = Config {
                identity,
                wire,
                ..Config::default()
            };
            let attributes = Attributes {
                features,
                ..Attributes::from(DeviceAttributes::new_zeroed())
            };
            assert_eq!(require_wire(&config, &attributes), expected, "{config:?}");
        }
    }
}
